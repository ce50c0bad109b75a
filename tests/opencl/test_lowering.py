"""What ``Lowering.add`` takes: exactly the operands, sizes and reals the table names."""

from typing import Any

import pytest

from accel.packets.lowering import Lowering
from accel.packets.step import Count, Per, Tensor
from contract.shape_key import ShapeKey
from tests.contract.graphs import decoder

X = Tensor("x", 0, 64, 64)
NORM: dict[str, Any] = {
    "x": X, "weight": X, "y": Tensor("y", 0, 64, 64), "tokens": Count(1, Per.TOKEN, 5), "groups": 1,
    "width": 64, "eps": 1e-6,
}  # fmt: skip


@pytest.fixture
def lowering() -> Lowering:
    return Lowering(decoder(), ShapeKey(5, 1), 2, "opencl")


def test_fields_stand_in_the_order_of_the_table(lowering):
    """Whatever order they are given in; an optional operand may be missing."""
    lowering.add("rms_norm", dict(reversed(NORM.items())))
    lowering.add("rms_norm", {name: NORM[name] for name in NORM if name != "weight"})
    whole, unweighted = lowering.step.ops
    assert whole.operands == (NORM["x"], NORM["weight"], NORM["y"])
    assert whole.max_sizes() == {"tokens": 5, "groups": 1, "width": 64}
    assert whole.reals == (1e-6,)
    assert unweighted.operands == (NORM["x"], None, NORM["y"])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        *(({name: None}, name) for name in ("x", "y", "tokens", "groups", "width", "eps")),
        ({"bias": X}, "'bias'"),
        *(({name: value}, "") for name, value in (("x", 3), ("tokens", 5), ("groups", X))),
        *(({name: value}, "") for name, value in (("eps", 1), ("weight", 0))),
    ],
    ids=str,
)
def test_other_fields_are_refused(lowering, changed, named):
    """One that is missing, unknown or of another kind: a tensor is no number, and a number that may
    grow with the step is a count. The error names the op and the field."""
    fields = {name: value for name, value in {**NORM, **changed}.items() if value is not None}
    with pytest.raises(ValueError, match=rf"rms_norm: .*{named}"):
        lowering.add("rms_norm", fields)


def test_an_op_without_a_row_is_refused(lowering):
    """A new opcode has a rule, but its op is not in the table yet."""
    with pytest.raises(ValueError, match=r"absolute: the table of device ops has no such row"):
        lowering.add("absolute", NORM)
    node = lowering.graph.nodes[0]
    with pytest.raises(ValueError, match=r"absolute: the table of device ops has no such row"):
        lowering.lower(node, "absolute")
