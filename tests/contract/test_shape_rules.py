"""Every row of the table: random well-formed operands verify, a wrong dimension does not."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import VerifyError
from contract.ir.cost import graph_cost
from contract.ir.verify import Rule
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import Access, Dim, OpSpec, bind_shapes, shape_of
from tests.contract.graphs import Drawn, well_formed

OPCODES = sorted(set(Opcode) - {Opcode.BARRIER})


def determined(spec: OpSpec, drawn: Drawn) -> list[tuple[str, int]]:
    """The (operand, axis) pairs whose size something else fixes."""
    axes = [
        (operand.name, axis, expression)
        for operand in spec.operands
        if operand.name in drawn.shapes
        for axis, expression in enumerate(operand.dims)
    ]
    seen = Counter(factor for _, _, e in axes for factor in set(e.split("*")))
    return [
        (name, axis)
        for name, axis, expression in axes
        if all(
            factor.isdigit() or factor in drawn.params or seen[factor] > 1
            for factor in expression.split("*")
        )
    ]


def changed(dim: Dim, step: int) -> Dim:
    """Another size: the other symbol, or ``step`` more."""
    if isinstance(dim, str):
        return "rows" if dim == "tokens" else "tokens"
    return dim + step


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: TABLE[opcode].name)
@settings(max_examples=12)
@given(data=st.data())
def test_well_formed_nodes_verify(opcode, data):
    """Whatever sizes are drawn, a node whose operands agree builds, verifies and has a cost. The
    rule gives every omitted output the shape a full node would have had. An output whose
    size is no product of others has to be named, in the one size that the constraint takes."""
    drawn = data.draw(well_formed(opcode))
    cost = graph_cost(drawn.build(), ShapeKey(5, 3), 40)
    assert cost.bytes_moved > 0 <= cost.flops
    inputs = {
        operand.name: drawn.shapes[operand.name]
        for operand in drawn.spec.inputs
        if operand.name in drawn.shapes
    }
    bound = bind_shapes(drawn.spec, inputs, drawn.params)
    if opcode is Opcode.ROW_DIGEST:
        _, words = drawn.shapes["digest"]
        assert isinstance(words, int)
        for other in (words - 1, words + 8):
            assert drawn.spec.constraint({**bound, "digest_words": other}, drawn.params)
        assert drawn.spec.constraint({**bound, "digest_words": words}, drawn.params) is None
        return
    if opcode is Opcode.HEAD_PRODUCT:
        total, heads = drawn.shapes["y"][1], bound["heads"]
        assert isinstance(total, int)
        assert isinstance(heads, int)
        width = total // heads
        assert drawn.spec.constraint({**bound, "y_width": width + 1}, drawn.params)
        assert drawn.spec.constraint({**bound, "y_width": width}, drawn.params) is None
        return
    for operand in drawn.spec.outputs:
        if operand.access is Access.WRITE:
            assert shape_of(operand, bound) == drawn.shapes[operand.name]


def test_bindings_belong_to_whoever_asked():
    """What one caller does to them, the next one with the same shapes does not see."""
    spec = TABLE[Opcode.ADD]
    shapes: dict[str, tuple[Dim, ...]] = {"a": ("tokens", 8), "b": ("tokens", 8)}
    first = bind_shapes(spec, shapes, {})
    expected = dict(first)
    first.clear()
    assert bind_shapes(spec, shapes, {}) == expected != {}


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: TABLE[opcode].name)
@settings(max_examples=12)
@given(data=st.data())
def test_one_wrong_dimension_is_rejected(opcode, data):
    """Changing any single determined dimension breaks the shape rule, at the node's name."""
    drawn = data.draw(well_formed(opcode))
    name, axis = data.draw(st.sampled_from(determined(drawn.spec, drawn)))
    shape = list(drawn.shapes[name])
    shape[axis] = changed(shape[axis], drawn.dtypes[name].block_elements)
    drawn.shapes[name] = tuple(shape)
    with pytest.raises(VerifyError) as caught:
        drawn.build()
    assert (caught.value.node, caught.value.rule) == ("node", Rule.SHAPE_RULE)


@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: TABLE[opcode].name)
@settings(max_examples=12)
@given(data=st.data())
def test_one_wrong_rank_is_rejected(opcode, data):
    """An operand with a dimension too many breaks the shape rule."""
    drawn = data.draw(well_formed(opcode))
    name = data.draw(st.sampled_from(sorted(drawn.shapes)))
    drawn.shapes[name] = (*drawn.shapes[name][:-1], 1, drawn.shapes[name][-1])
    if any(isinstance(dim, str) for dim in drawn.shapes[name][1:]):
        drawn.shapes[name] = (*drawn.shapes[name][::-1],)
    with pytest.raises(VerifyError) as caught:
        drawn.build()
    assert caught.value.rule == Rule.SHAPE_RULE
