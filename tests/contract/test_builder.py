"""GraphBuilder: what it infers, and what it refuses before the verifier sees a graph."""

import dataclasses
from types import MappingProxyType

import pytest

from contract.dtypes import F32
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, GraphBuilder, View
from contract.ir.verify import Rule
from contract.opcodes import Opcode
from tests.contract.graphs import decoder


def test_declaring_a_buffer_twice_differently():
    b = GraphBuilder("g")
    assert b.request("r", 4) == b.request("r", 4)
    with pytest.raises(VerifyError) as caught:
        b.request("r", 5)
    assert (caught.value.node, caught.value.rule) == ("r", Rule.ONE_DECLARATION)


def test_an_argument_that_is_neither_view_nor_number():
    b = GraphBuilder("g")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8))
    with pytest.raises(VerifyError) as caught:
        b.emit(Opcode.SCALE, "n", x=x, factor="2")  # type: ignore[arg-type]
    assert (caught.value.node, caught.value.rule) == ("n", Rule.OPERANDS)


def test_the_result_of_a_node_is_what_it_writes():
    """A node that also updates state yields its written output, not the state."""
    b = GraphBuilder("g")
    y = b.emit(
        Opcode.SSM_CONV1D, "conv", x=b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8)),
        weight=b.buffer("w", BufferKind.WEIGHT, F32, (8, 4)), query=b.request("query", "tokens", 4),
        state=b.buffer("state", BufferKind.STATE, F32, (2, 3, 8)), history=3,
    )  # fmt: skip
    assert y == View("scratch.conv")


def test_integers_become_float_parameters():
    b = GraphBuilder("g")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8))
    b.emit(Opcode.SCALE, x=x, factor=2)
    (node,) = b.build().nodes
    assert type(node.params["factor"]) is float


def test_a_barrier_has_no_result():
    with pytest.raises(VerifyError, match="use barrier"):
        GraphBuilder("g").emit(Opcode.BARRIER)


def test_what_it_builds_cannot_be_changed():
    built = decoder()
    assert isinstance(built.buffers, MappingProxyType)
    with pytest.raises(TypeError):
        built.nodes[0].operands["x"] = View("y")  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.name = "other"  # type: ignore[misc]
