"""Sampling and log-probabilities by work-groups: the code of accelerators, on whatever device there
is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from accel.opencl import runtime
from accel.opencl.device import Device
from accel.opencl.program import module_options
from accel.opencl.tier import OpenClTier
from contract.opcodes import Opcode
from contract.records import SAMPLING
from harness.parity.cases import Case, generate
from harness.parity.execute import by_definition, compare, on_tier
from harness.parity.operands import fill
from harness.parity.shape import OpShape
from tests.opencl.conftest import OpenTier
from tests.opencl.work_groups import open_work_groups

CONSTRAINTS = frozenset(("allowed", "bias"))
VOCABULARIES = (129, 5000, 20011)


def cases() -> Iterator[Case]:
    """The parity suite's, and rows long enough that every item of a group has candidates."""
    yield from generate(Opcode.SAMPLE)
    yield from generate(Opcode.LOG_PROBABILITIES)
    for vocab in VOCABULARIES:
        dims = {"rows": 7, "vocab": vocab, "recent_tokens": 8, "slots": 3}
        tables = {"masks": 4, "mask_words": -(-vocab // 32), "biases": 50}
        shape = OpShape(f"7x{vocab}", dims, absent=CONSTRAINTS)
        constrained = OpShape(f"7x{vocab}-constrained", dims | tables)
        for kind in ("normal", "zeros", "nan"):
            for repeat in range(2):
                yield Case(Opcode.SAMPLE, None, shape, kind, repeat)
                yield Case(Opcode.SAMPLE, None, constrained, kind, repeat)
            listed = OpShape(f"3x{vocab}", {"rows": 3, "vocab": vocab, "top": 20})
            yield Case(Opcode.LOG_PROBABILITIES, None, listed, kind, 0)


@pytest.fixture
def work_groups(
    open_opencl: OpenTier, device: Device, monkeypatch: pytest.MonkeyPatch
) -> OpenClTier:
    """A tier that takes its device for an accelerator; its kernels are optimized, since they run
    for longer than they are compiled."""
    monkeypatch.setattr(runtime, "module_options", module_options)
    return open_work_groups(open_opencl, device, monkeypatch)


@pytest.mark.long
def test_work_groups_draw_the_tokens_of_the_definition(work_groups: OpenClTier) -> None:
    """Penalties, ties, thresholds and draws, whatever an item's share of a row is."""
    drawn = 0
    for case in cases():
        assert compare(work_groups, case) == {}, str(case)
        drawn += case.sizes["rows"]
    assert drawn > 500


def test_a_logit_that_overflows_downwards_is_not_chosen(open_opencl: OpenTier) -> None:
    """One that a temperature drives to -infinity does not make its row a broken one."""
    dims = {"rows": 3, "vocab": 257, "recent_tokens": 8, "slots": 2}
    case = Case(Opcode.SAMPLE, None, OpShape("cold", dims, absent=CONSTRAINTS), "normal", 0)
    operands = fill(case)
    operands["sampling"].view(SAMPLING)["temperature"] = 0.1
    operands["logits"][:, 5] = -1e38
    expected = by_definition(case, operands)["token"]
    assert (expected >= 0).all()
    assert (on_tier(open_opencl(), case, operands)["token"] == expected).all()


@pytest.mark.long
def test_a_wrong_draw_is_noticed(work_groups: OpenClTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing from another position's random number fails."""
    monkeypatch.setattr("reference.ops.sample.draw", lambda seed, position: np.uint32(2**31))
    assert any(compare(work_groups, case) for case in cases())
