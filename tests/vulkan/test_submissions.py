"""Steps under way together: each has its own inputs and outputs, and any number of tokens."""

from __future__ import annotations

import pytest

from reference.cpu.tier import CpuTier
from tests.tiers.chained import LARGEST, Lowered, same, step_block
from tests.vulkan.conftest import OpenTier


def test_snapshots_that_are_shared_are_noticed(
    open_vulkan: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one snapshot for all steps, which the host overwrites while they wait."""
    late, exact = Lowered(open_vulkan()), Lowered(CpuTier())
    late.outputs(step_block(1, seed=99))
    submissions = late.tier._submissions
    (slots,) = submissions._free.values()
    monkeypatch.setattr(submissions, "_free_slots", lambda batch: slots[-1:])
    blocks = [step_block(LARGEST.tokens, seed) for seed in range(8)]
    fences = [late.submit(block, "product", "folded") for block in blocks]
    expected = [exact.outputs(block) for block in blocks]
    late.tier.wait(fences[-1])
    assert not all(same(f.outputs, e) for f, e in zip(fences, expected, strict=True) if f.done)
