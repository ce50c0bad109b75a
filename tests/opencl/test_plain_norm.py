"""A norm with neither a weight nor an epsilon, on the device."""

from __future__ import annotations

import numpy as np
import pytest

from contract.opcodes import Opcode
from harness.parity.cases import Case
from harness.parity.execute import compare, on_tier
from harness.parity.operands import fill
from harness.parity.shape import OpShape
from harness.parity.values import KINDS
from tests.opencl.conftest import OpenTier

SHAPE = OpShape(
    "plain", {"tokens": 5, "width": 896, "eps": 0.0, "groups": 1}, absent=frozenset(("weight",))
)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"zeros"}))
def test_the_device_normalizes_as_defined(open_opencl: OpenTier, kind: str) -> None:
    """All bits, of every kind of values that has a direction or breaks."""
    assert compare(open_opencl(), Case(Opcode.RMS_NORM, None, SHAPE, kind, 0)) == {}


def test_a_zero_vector_is_nan_on_the_device(open_opencl: OpenTier) -> None:
    """No tier invents a direction."""
    case = Case(Opcode.RMS_NORM, None, SHAPE, "zeros", 0)
    assert np.isnan(on_tier(open_opencl(), case, fill(case))["y"]).all()
