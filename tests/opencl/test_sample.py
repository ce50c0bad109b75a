"""Sampling by a work-group a row: the code of accelerators, on whatever device there is."""

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
    for vocab in VOCABULARIES:
        shape = Shape(f"7x{vocab}", {"rows": 7, "vocab": vocab, "recent_tokens": 8, "slots": 3})
        for kind in ("normal", "zeros", "nan"):
            for repeat in range(4):
                yield Case(Opcode.SAMPLE, None, shape, kind, repeat)


@pytest.fixture
def work_groups(
    open_opencl: OpenTier, device: Device, monkeypatch: pytest.MonkeyPatch
) -> OpenClTier:
    """A tier that takes its device for an accelerator."""
    ops = ("argmax_part", "argmax", "sample_part", "sample")
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
