"""Fused opcodes written out: the same bits, the same work, a graph that verifies."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.dtypes import F32
from contract.ir.cost import graph_cost
from contract.ir.expand import EXPANSIONS, expand
from contract.ir.graph import BufferKind, Graph, GraphBuilder, Node
from contract.ir.inputs import InputLayout
from contract.ir.verify import verify
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from harness.parity.cases import generate
from harness.parity.execute import build_graph, compare
from reference.cpu.tier import CpuBatch, CpuBuffer, CpuTier
from tests.contract.graphs import decoder, well_formed

FUSED = sorted(EXPANSIONS)
KEY = ShapeKey(5, 3)
CONTEXT = 40

Expansion = Callable[[Graph], Graph]


class WrittenOut(CpuTier):
    """The definitions of what each graph is expanded to."""

    def __init__(self, expansion: Expansion = expand) -> None:
        super().__init__(1, definitions_only=True)
        self._expansion = expansion

    def lower(
        self, graph: Graph, buffers: Mapping[str, CpuBuffer], bucket: ShapeKey, inputs: InputLayout
    ) -> CpuBatch:
        return super().lower(self._expansion(graph), buffers, bucket, inputs)


@pytest.mark.parametrize("opcode", FUSED, ids=lambda opcode: opcode.name)
def test_parts_leave_the_bits_of_the_definition(opcode):
    """On every parity case: any storage type, size, slice, absent operand and kind of values."""
    with WrittenOut() as tier:
        for case in generate(opcode):
            assert compare(tier, case) == {}, str(case)


def test_a_wrong_part_is_noticed():
    """Two products swapped fail the comparison above."""

    def swapped(graph: Graph) -> Graph:
        whole = expand(graph)
        *kept, gate, up = whole.nodes
        nodes = (*kept, *(_with_y(a, b) for a, b in ((gate, up), (up, gate))))
        return Graph(whole.name, whole.stage, whole.buffers, nodes)

    cases = [case for case in generate(Opcode.RMS_NORM_FUSED_MLP_GATE_UP) if case.dtype is F32]
    with WrittenOut(swapped) as tier:
        assert any(compare(tier, case) for case in cases)


def _with_y(node: Node, other: Node) -> Node:
    operands = {**node.operands, "y": other.operands["y"]}
    return Node(node.name, node.opcode, MappingProxyType(operands), node.params)


@pytest.mark.parametrize("opcode", FUSED, ids=lambda opcode: opcode.name)
@given(data=st.data())
def test_the_parts_verify(opcode, data):
    """Whatever the shapes, no fused opcode is left and nothing else of the graph changes."""
    graph = data.draw(well_formed(opcode)).build()
    parts = expand(graph)
    verify(parts)
    assert not parts.opcodes & EXPANSIONS.keys()
    assert graph.buffers.items() <= parts.buffers.items()
    added = [parts.buffers[name] for name in parts.buffers.keys() - graph.buffers.keys()]
    assert all(decl.kind is BufferKind.SCRATCH for decl in added)


@pytest.mark.parametrize("opcode", FUSED, ids=lambda opcode: opcode.name)
def test_the_parts_compute_as_much_and_move_no_less(opcode):
    """The operations a fused opcode counts are those of its parts; what it saves is traffic."""
    for case in generate(opcode):
        if not case.shape.absent:
            graph = build_graph(case)
            fused, parts = (graph_cost(g, KEY, CONTEXT) for g in (graph, expand(graph)))
            assert parts.flops == fused.flops
            assert parts.bytes_moved >= fused.bytes_moved


def test_what_is_kept_and_what_has_no_parts_stays():
    graph = decoder()
    assert expand(graph, frozenset(EXPANSIONS)) is graph
    parts = expand(graph)
    rest = [node for node in graph.nodes if node.opcode is not Opcode.LM_HEAD]
    assert [node for node in parts.nodes if node in rest] == rest
    product = parts.nodes[-2]
    assert (product.name, product.opcode) == ("lm_head.product", Opcode.MATMUL)


def test_parts_take_no_name_that_the_graph_has():
    """A node or buffer called as a part would be keeps its name."""
    b = GraphBuilder("g")
    given = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", 8))
    x = b.scratch("scratch.fused.norm", "tokens", 8)
    b.emit(Opcode.SCALE, "fused.norm", x=given, y=x, factor=2.0)
    matrices = {
        f"{name}_weight": b.buffer(name, BufferKind.WEIGHT, F32, (4, 8)) for name in ("gate", "up")
    }
    weight = b.buffer("n", BufferKind.WEIGHT, F32, (8,))
    b.emit(
        Opcode.RMS_NORM_FUSED_MLP_GATE_UP, "fused", x=x, norm_weight=weight, eps=1e-5, **matrices
    )
    parts = expand(b.build())
    verify(parts)
    names = [node.name for node in parts.nodes]
    assert names == ["fused.norm", "fused.norm'", "fused.gate", "fused.up"]
    assert parts.nodes[1].operands["y"].buffer == "scratch.fused.norm'"
