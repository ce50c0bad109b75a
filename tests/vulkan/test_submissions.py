"""Steps under way together: each has its own inputs and outputs, and any number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from reference.cpu.tier import CpuTier
from tests.opencl.test_submissions import LARGEST, Lowered, same, step_block
from tests.vulkan.conftest import OpenTier


@pytest.mark.parametrize("shared", [True, False])
def test_queued_steps_keep_their_inputs_and_outputs(open_vulkan: OpenTier, shared: bool) -> None:
    """Inputs are overwritten as soon as they were submitted, and nothing is waited for in between.

    Outputs and states are those of the CPU tier, which runs one step after the other."""
    late, exact = Lowered(open_vulkan(shared=shared)), Lowered(CpuTier())
    for first in range(3):
        in_flight, expected = [], []
        for number, tokens in enumerate((LARGEST.tokens, 5, 1, 17)):
            block = step_block(tokens, seed=4 * first + number)
            in_flight.append(late.submit(block, "product", "folded"))
            expected.append(exact.outputs(block))
            block[:] = 0xFF
        for fence, outputs in zip(reversed(in_flight), reversed(expected), strict=True):
            late.tier.wait(fence)
            assert same(fence.outputs, outputs)
    for got, requested in zip(late.states(), exact.states(), strict=True):
        assert np.array_equal(got, requested)


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


def test_snapshots_are_used_again(open_vulkan: OpenTier) -> None:
    """As many as steps were ever under way together, however many steps there were."""
    late = Lowered(open_vulkan())
    submissions = late.tier._submissions
    for _ in range(12):
        for fence in [late.submit(step_block(3, 1), "product") for _ in range(3)]:
            late.tier.wait(fence)
    late.outputs(step_block(3, 1))
    free = sum(len(found) for found in submissions._free.values())
    assert 1 <= free + len(submissions._in_flight) <= 3
