"""The flow of data: by columns, through updates in place, from before the step."""

from types import MappingProxyType

from contract.dtypes import F32
from contract.ir.flow import Flow, data_flow
from contract.ir.graph import BufferDecl, BufferKind, Graph, GraphBuilder, Node, View
from contract.opcodes import Opcode
from contract.spec import Stage
from tests.contract.graphs import decoder

GRAPH = decoder()
NUMBER = {node.name: index for index, node in enumerate(GRAPH.nodes)}
FLOW = data_flow(GRAPH)


def reads(name: str) -> set[tuple[str | None, str]]:
    """Writers by name, and what they wrote, that the named node reads."""
    return {
        (None if flow.source is None else GRAPH.nodes[flow.source].name, flow.buffer)
        for flow in FLOW.reads[NUMBER[name]]
    }


def test_a_reader_depends_on_the_columns_it_reads_and_no_others():
    assert ("layer[0].v", "layer[0].qkv") in reads("layer[0].kv_write")
    assert reads("layer[0].rope_q") == {
        ("layer[0].q", "layer[0].qkv"), (None, "constant.rope"), (None, "request.query"),
    }  # fmt: skip


def test_state_flows_from_before_the_step_until_it_is_updated():
    assert (None, "state.kv[0]") in reads("layer[0].kv_write")
    attended = {pair for pair in reads("layer[0].attention") if pair[1] == "state.kv[0]"}
    assert attended == {("layer[0].kv_write", "state.kv[0]")}
    assert FLOW.last["state.kv[0]"] == (NUMBER["layer[0].kv_write"],)


def test_a_barrier_reads_nothing():
    assert FLOW.reads[NUMBER["barrier"]] == ()


def test_an_update_takes_over_only_what_it_covers():
    """Columns beside an update are still those of who wrote the whole buffer."""
    state = BufferDecl("s", BufferKind.STATE, F32, (1, 3, 8))

    def update(*columns: int) -> Node:
        view = View("s", (columns[0], columns[1]) if columns else None)
        return Node("n", Opcode.SSM_CONV1D, MappingProxyType({"state": view}), MappingProxyType({}))

    nodes = (update(), update(0, 4), update(4, 8), update(), update())
    graph = Graph("g", Stage.BOTH, MappingProxyType({"s": state}), nodes)
    found = [[flow.source for flow in flows] for flows in data_flow(graph).reads]
    assert found == [[None], [0], [0], [0, 1, 2], [3]]


def test_a_buffer_nobody_wrote_comes_from_before_the_step():
    b = GraphBuilder("g")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8))
    b.emit(Opcode.SCALE, x=x, factor=2.0, y=b.output("y", "tokens", 8))
    flow = data_flow(b.build())
    assert flow.reads == ((Flow(None, "x"),),)
    assert flow.last == {"y": (0,)}
