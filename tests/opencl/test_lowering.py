"""What ``Lowering.add`` takes: exactly the operands, sizes and reals the table names."""

from __future__ import annotations

from typing import Any

import pytest

from accel.packets.lowering import Lowering
from accel.packets.step import Count, Per, Tensor
from contract.shape_key import ShapeKey
from tests.contract.graphs import decoder

X = Tensor("x", 0, 64, 64)
NORM: dict[str, Any] = {
    "x": X,
    "weight": X,
    "y": Tensor("y", 0, 64, 64),
    "tokens": Count(1, Per.TOKEN, 5),
    "groups": 1,
    "width": 64,
    "eps": 1e-6,
}


@pytest.fixture
def lowering() -> Lowering:
    return Lowering(decoder(), ShapeKey(5, 1), 2, "opencl")


def test_fields_stand_in_the_order_of_the_table(lowering: Lowering) -> None:
    """Whatever order they are given in; an optional operand may be missing."""
    lowering.add("rms_norm", dict(reversed(NORM.items())))
    lowering.add("rms_norm", {name: NORM[name] for name in NORM if name != "weight"})
    whole, unweighted = lowering.step.ops
    assert whole.operands == (NORM["x"], NORM["weight"], NORM["y"])
    assert whole.max_sizes() == {"tokens": 5, "groups": 1, "width": 64}
    assert whole.reals == (1e-6,)
    assert unweighted.operands == (NORM["x"], None, NORM["y"])


@pytest.mark.parametrize("name", ["x", "y", "tokens", "groups", "width", "eps"])
def test_a_missing_field_is_refused(lowering: Lowering, name: str) -> None:
    """The error names the op and the field."""
    with pytest.raises(ValueError, match=rf"rms_norm: .*{name}"):
        lowering.add("rms_norm", {other: NORM[other] for other in NORM if other != name})


def test_an_unknown_field_is_refused(lowering: Lowering) -> None:
    """Nothing is dropped silently."""
    with pytest.raises(ValueError, match=r"rms_norm: .*'bias'"):
        lowering.add("rms_norm", NORM, bias=X)


@pytest.mark.parametrize(
    ("name", "value"), [("x", 3), ("tokens", 5), ("groups", X), ("eps", 1), ("weight", 0)]
)
def test_a_field_of_the_wrong_kind_is_refused(lowering: Lowering, name: str, value: Any) -> None:
    """A tensor is no number, and a number that may grow with the step is a count."""
    with pytest.raises(ValueError, match="rms_norm: "):
        lowering.add("rms_norm", {**NORM, name: value})
