"""Sampling and log-probabilities by work-groups: the code of accelerators, on whatever device there
is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from accel.opencl.device import Device
from accel.opencl.tier import OpenClTier
from contract.opcodes import Opcode
from harness.parity import Case, compare, generate
from harness.parity.shape import Shape
from tests.opencl.conftest import OpenTier
from tests.opencl.work_groups import open_work_groups

VOCABULARIES = (129, 5000, 20011)


def cases() -> Iterator[Case]:
    """The parity suite's, and rows long enough that every item of a group has candidates."""
    yield from generate(Opcode.SAMPLE, repeats=2)
    yield from generate(Opcode.ARGMAX)
    yield from generate(Opcode.LOG_PROBABILITIES, repeats=2)
    for vocab in VOCABULARIES:
        dims = {"rows": 7, "vocab": vocab, "recent_tokens": 8, "slots": 3}
        tables = {"masks": 4, "mask_words": -(-vocab // 32), "biases": 50}
        shape = Shape(f"7x{vocab}", dims, absent=frozenset(("allowed", "bias")))
        constrained = Shape(f"7x{vocab}-constrained", dims | tables)
        for kind in ("normal", "zeros", "nan"):
            for repeat in range(4):
                yield Case(Opcode.SAMPLE, None, shape, kind, repeat)
                yield Case(Opcode.SAMPLE, None, constrained, kind, repeat)
            listed = Shape(f"3x{vocab}", {"rows": 3, "vocab": vocab}, {"top": 20})
            yield Case(Opcode.LOG_PROBABILITIES, None, listed, kind, 0)


@pytest.fixture
def work_groups(
    open_opencl: OpenTier, device: Device, monkeypatch: pytest.MonkeyPatch
) -> OpenClTier:
    """A tier that takes its device for an accelerator."""
    ops = ("argmax_part", "argmax", "sample_part", "sample")
    ops += ("log_probabilities_part", "log_probabilities_sum", "log_probabilities")
    return open_work_groups(open_opencl, device, monkeypatch, ops)


def test_work_groups_draw_the_tokens_of_the_definition(work_groups: OpenClTier) -> None:
    """Penalties, ties, thresholds and draws, whatever an item's share of a row is."""
    drawn = 0
    for case in cases():
        assert compare(work_groups, case) == {}, str(case)
        drawn += case.sizes["rows"]
    assert drawn > 500


def test_a_wrong_draw_is_noticed(work_groups: OpenClTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing from another position's random number fails."""
    monkeypatch.setattr("reference.ops.sample.draw", lambda seed, position: np.uint32(2**31))
    assert any(compare(work_groups, case) for case in cases())
