"""Output rows selected early: which nodes are of rows then, when a graph stays as it was, and that
what is moved behind the selection computes row by row."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from contract.dtypes import F32, Q4_K, Q8_0
from contract.ir.cost import cost
from contract.ir.graph import BufferKind, Graph, GraphBuilder, Node, View
from contract.ir.prune_rows import ROW_BY_ROW, prune_rows, select_rows_early
from contract.ir.verify import verify
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import Access
from harness.parity.cases import generate
from harness.parity.execute import by_definition
from harness.parity.operands import fill
from tests.contract.graphs import decoder
from tests.contract.model_graphs import TINY, hybrid, slider

MANY = ShapeKey(64, 3)
FORMATS = (None, F32, Q8_0, Q4_K)


def of_rows(graph: Graph) -> list[str]:
    """Nodes whose results have a row an output row."""
    return [node.name for node in graph.nodes if _rows_of(graph, node) == "rows"]


def _rows_of(graph: Graph, node: Node) -> int | str | None:
    written = (o.name for o in TABLE[node.opcode].operands if o.access is Access.WRITE)
    return next((graph.shape(node.operands[name])[0] for name in written), None)


def selections(graph: Graph) -> list[tuple[str, View]]:
    found = [node for node in graph.nodes if node.opcode is Opcode.SELECT_ROWS]
    return [(node.name, node.operands["x"]) for node in found]


def with_kind(graph: Graph, buffer: str, kind: BufferKind) -> Graph:
    decl = replace(graph.buffers[buffer], kind=kind)
    return replace(graph, buffers=MappingProxyType({**graph.buffers, buffer: decl}))


def test_all_behind_the_last_attention_is_of_rows():
    graph = prune_rows(slider(), MANY)
    verify(graph)
    assert of_rows(graph) == [
        *("attention[3].rows", "ffn_residual[2].rows", "attn_output[3]", "attn_residual[3]"),
        *("ffn_norm[3]", "ffn_gate[3]", "ffn_up[3]", "geglu[3]", "ffn_down[3]", "ffn_residual[3]"),
        *("output_norm", "lm_head"),
    ]
    assert selections(graph) == [
        ("attention[3].rows", View("scratch.attention[3]")),
        ("ffn_residual[2].rows", View("scratch.ffn_residual[2]")),
    ]


def test_experts_are_of_rows():
    graph = prune_rows(hybrid(), MANY)
    verify(graph)
    experts = [f"{name}[3]" for name in ("router", "experts_in", "experts_gated", "experts_out")]
    found = of_rows(graph)
    assert found[found.index("router[3]") :][:4] == experts
    assert not any("[2]" in name for name in found if name != "experts_out[2].rows")


def test_nodes_keep_their_names_and_their_order():
    for graph in (decoder(), slider(), hybrid()):
        early = select_rows_early(graph)
        verify(early)
        before, after = (
            [node.name for node in one.nodes if node.opcode is not Opcode.SELECT_ROWS]
            for one in (graph, early)
        )
        assert before == after
        assert select_rows_early(early) is early


def test_a_gate_in_front_of_attention_is_of_rows_too():
    """A recurrent layer's gate is a product of the normed tokens, which others read as well: rows
    are normed again."""
    graph = select_rows_early(hybrid(replace(TINY, layers=3)))
    verify(graph)
    assert selections(graph) == [
        ("experts_out[1].rows", View("scratch.experts_out[1]")),
        ("delta_net[2].rows", View("scratch.delta_net[2]")),
    ]
    assert of_rows(graph)[:3] == ["experts_out[1].rows", "ssm_norm[2].rows", "ssm_gate[2]"]
    assert {"ssm_gated[2]", "ssm_out[2]"} <= set(of_rows(graph))


def test_what_is_saved_is_the_last_layers_work():
    """Of a layer all but the products of queries, keys and values, and attention."""
    graph, key = slider(), ShapeKey(512, 1)
    late, early = (
        sum(cost(n, one, key, 256).flops for n in one.nodes if n.opcode is Opcode.MATMUL)
        for one in (graph, prune_rows(graph, key))
    )
    products = TINY.hidden * (TINY.heads * TINY.head_dim + 3 * TINY.width)
    assert late - early == 2 * products * (512 - 1)


@pytest.mark.parametrize(
    "bucket", [(1, 1), (4, 4), (4, 1), (12, 12), (16, 1), (16, 16), (64, 17), (64, 64), (512, 512)]
)
def test_forms_of_decoding_stay_as_they_are(bucket):
    """Few tokens, or more rows than a quarter of them."""
    graph = slider()
    assert prune_rows(graph, ShapeKey(*bucket)) is graph


def test_what_others_see_is_of_all_tokens():
    """A result the host reads, and all in front of it, is not selected from."""
    graph = slider()
    for last in ("scratch.ffn_residual[3]", "scratch.select_rows"):
        shown = with_kind(graph, last, BufferKind.OUTPUT)
        verify(shown)
        assert select_rows_early(shown) is shown
    shown = with_kind(graph, "scratch.attn_residual[3]", BufferKind.OUTPUT)
    early = select_rows_early(shown)
    verify(early)
    assert of_rows(early)[:2] == ["attn_residual[3].rows", "ffn_norm[3]"]
    assert "attn_residual[3]" not in of_rows(early)


def test_what_cannot_be_selected_leaves_the_graph():
    """SELECT_ROWS has no rows of integers: of experts that somebody sees nothing is selected."""
    shown = with_kind(hybrid(), "scratch.ids[3]", BufferKind.OUTPUT)
    verify(shown)
    assert select_rows_early(shown) is shown


def test_graphs_without_exactly_one_selection_of_rows():
    b = GraphBuilder("g")
    rows = b.request("request.output_rows", "rows")
    x = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", 8))
    scaled = b.emit(Opcode.SCALE, "scaled", x=x, factor=2.0)
    plain = b.build()
    assert select_rows_early(plain) is plain
    for n in range(2):
        b.emit(Opcode.SELECT_ROWS, f"rows[{n}]", x=scaled, output_rows=rows)
    twice = b.build()
    assert select_rows_early(twice) is twice


def test_columns_are_selected_alone_and_names_are_new():
    """Of a wider buffer its columns; a name that the graph has gets a mark."""
    b = GraphBuilder("g")
    rows = b.request("request.output_rows", "rows")
    wide = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", 8))
    x = b.emit(Opcode.SCALE, "in.rows", x=wide[0:4], factor=2.0)
    total = b.emit(Opcode.ADD, "total", a=x, b=wide[4:8])
    selected = b.emit(Opcode.SELECT_ROWS, "selected", x=total, output_rows=rows)
    y = b.output("out", "rows", 2)
    b.emit(Opcode.SCALE, "first", x=selected[0:2], factor=3.0, y=y)
    early = select_rows_early(b.build())
    verify(early)
    assert selections(early) == [
        ("in.rows'", View("in", (0, 4))),
        ("in.rows''", View("in", (4, 8))),
    ]
    assert early.nodes[-1].operands["x"] == View("scratch.total", (0, 2))
    assert "scratch.selected" not in early.buffers


def test_columns_written_later_are_no_matter():
    """Of a buffer whose other columns are written behind the node that reads some."""
    b = GraphBuilder("g")
    rows = b.request("request.output_rows", "rows")
    given = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", 4))
    wide = b.scratch("wide", "tokens", 8)
    b.emit(Opcode.SCALE, "front", x=given, factor=2.0, y=wide[0:4])
    x = b.emit(Opcode.SCALE, "early", x=wide[0:4], factor=3.0)
    b.emit(Opcode.SCALE, "behind", x=given, factor=4.0, y=wide[4:8])
    total = b.emit(Opcode.ADD, "total", a=x, b=wide[4:8])
    selected = b.emit(Opcode.SELECT_ROWS, "selected", x=total, output_rows=rows)
    b.emit(Opcode.SCALE, "last", x=selected, factor=5.0, y=b.output("out", "rows", 4))
    early = select_rows_early(b.build())
    verify(early)
    names = ["front", "wide.rows", "early", "behind", "wide.rows'", "total", "last"]
    assert [node.name for node in early.nodes] == names


def test_what_is_updated_in_place_is_not_selected_from():
    """It may have other rows where they would be selected."""
    b = GraphBuilder("g")
    rows = b.request("request.output_rows", "rows")
    pairs = b.request("pairs", "rows", 2)
    given = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", 4))
    x = b.emit(Opcode.SCALE, "x", x=given, factor=2.0)
    b.emit(Opcode.COPY_ROWS, "moved", source=given, pairs=pairs, target=x)
    b.barrier()
    total = b.emit(Opcode.ADD, "total", a=x, b=given)
    selected = b.emit(Opcode.SELECT_ROWS, "selected", x=total, output_rows=rows)
    b.emit(Opcode.SCALE, "last", x=selected, factor=5.0, y=b.output("out", "rows", 4))
    graph = b.build()
    assert select_rows_early(graph) is graph


@pytest.mark.parametrize("opcode", sorted(ROW_BY_ROW), ids=lambda opcode: opcode.name)
def test_rows_are_computed_alone(opcode):
    """By the definitions: of some rows of the operands, in any order, those rows of the results."""
    tried = 0
    for case in (case for case in generate(opcode) if case.dtype in FORMATS):
        operands = fill(case)
        of_tokens = [o.name for o in TABLE[opcode].operands if o.dims[0] == "tokens"]
        chosen = np.random.default_rng(case.seed).permutation(case.sizes["tokens"])[:3]
        some = {n: x[chosen] if n in of_tokens else x for n, x in operands.items()}
        whole, part = by_definition(case, operands), by_definition(case, some)
        for name, values in part.items():
            assert values.tobytes() == whole[name][chosen].tobytes(), f"{case}: {name}"
        tried += len(chosen) > 1
    assert tried
