"""Costs from the table, checked against counts done by hand."""

import pytest

from contract.dtypes import F16, F32, I32, Q4_K, Q6_K
from contract.ir.cost import Cost, cost, graph_cost
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.contract.graphs import decoder, weight

KEY = ShapeKey(tokens=3, rows=2)


def only(b: GraphBuilder) -> tuple[Graph, Cost]:
    graph = b.build()
    (node,) = graph.nodes
    return graph, cost(node, graph, KEY, context=40)


def activation(b: GraphBuilder, name: str, *shape: int | str) -> View:
    return b.buffer(name, BufferKind.REQUEST, F32, shape)


def test_a_quantized_matrix_counts_its_blocks():
    """A 512 x 256 Q4_K matrix is 512 blocks of 144 bytes."""
    b = GraphBuilder("g")
    w = weight(b, "w", 512, 256, dtype=Q4_K)
    b.emit(Opcode.MATMUL, x=activation(b, "x", "tokens", 256), weight=w)
    _, value = only(b)
    assert value == Cost(512 * 144 + 3 * 256 * 4, 3 * 512 * 4, 2 * 3 * 512 * 256)
    assert value.intensity == pytest.approx(value.flops / value.bytes_moved)


def test_an_embedding_reads_rows_and_not_the_table():
    b = GraphBuilder("g")
    table = weight(b, "w", 1000, 512, dtype=Q6_K)
    b.emit(Opcode.EMBED, query=b.request("q", "tokens", 4), table=table)
    _, value = only(b)
    assert value == Cost(3 * 2 * 210 + 3 * 16, 3 * 512 * 4, 0)


def attention(window: int) -> Cost:
    b = GraphBuilder("g")
    b.emit(
        Opcode.FLASH_ATTN_BATCHED, q=activation(b, "q", "tokens", 64),
        kv=b.buffer("kv", BufferKind.STATE, F16, (100, 2, 16, 2, 16)),
        page_table=b.request("pages", 4, 25), query=b.request("query", "tokens", 4), heads=4,
        kv_heads=2, head_dim=16, scale=0.25, window=window,
    )  # fmt: skip
    return only(b)[1]


def test_attention_reads_its_context_and_not_the_pool():
    fixed = 3 * 64 * 4 + 3 * 16
    assert attention(0).bytes_read == fixed + 3 * 40 * 2 * 32 * 2 + 3 * 3 * 4
    assert attention(0).bytes_written == 3 * 64 * 4
    assert attention(0).flops == 3 * 4 * 40 * (4 * 16 + 18)


def test_a_window_bounds_what_attention_reads():
    assert attention(8).bytes_read == 3 * 64 * 4 + 3 * 16 + 3 * 8 * 2 * 32 * 2 + 3 * 4
    assert attention(1000) == attention(0)


def test_a_scatter_into_the_pool_reads_nothing_of_it():
    b = GraphBuilder("g")
    b.emit(
        Opcode.KV_WRITE_BATCHED, k=activation(b, "k", "tokens", 32),
        v=activation(b, "v", "tokens", 32),
        kv=b.buffer("kv", BufferKind.STATE, F16, (100, 2, 16, 2, 16)),
        page_table=b.request("pages", 4, 25), query=b.request("query", "tokens", 4), kv_heads=2,
        head_dim=16,
    )  # fmt: skip
    _, value = only(b)
    assert value == Cost(2 * 3 * 32 * 4 + 3 * 16 + 3 * 4, 2 * 3 * 32 * 2, 0)


@pytest.mark.parametrize(("tokens", "experts_read"), [(1, 2), (2, 4), (100, 8)])
@pytest.mark.parametrize("up", ["up", "gate"])
def test_experts_are_read_once_each_at_most(tokens, experts_read, up):
    """Twice as many where gates are matrices of their own."""
    b = GraphBuilder("g")
    b.emit(
        Opcode.MOE_GATE_UP, x=activation(b, "x", "tokens", 256),
        gate_weight=weight(b, "gate", 8, 16, 256, dtype=Q4_K),
        up_weight=weight(b, up, 8, 16, 256, dtype=Q4_K), ids=b.request("ids", "tokens", 2),
    )  # fmt: skip
    graph = b.build()
    value = cost(graph.nodes[0], graph, ShapeKey(tokens, 0), context=1)
    stacks = len({up, "gate"})
    assert value.bytes_read == stacks * experts_read * 16 * 144 + tokens * (256 * 4 + 2 * 4)


def test_an_update_is_read_and_written():
    b = GraphBuilder("g")
    b.emit(
        Opcode.SSM_CONV1D, x=activation(b, "x", "tokens", 8), weight=weight(b, "w", 8, 4),
        query=b.request("query", "tokens", 4),
        state=b.buffer("state", BufferKind.STATE, F32, (2, 3, 8)), history=3,
    )  # fmt: skip
    _, value = only(b)
    state = 2 * 3 * 8 * 4
    assert value.bytes_read == 3 * 8 * 4 + 8 * 4 * 4 + 3 * 16 + state
    assert value.bytes_written == 3 * 8 * 4 + state


def test_a_slice_costs_its_columns():
    b = GraphBuilder("g")
    x = activation(b, "x", "tokens", 64)
    b.emit(Opcode.ADD, a=x[0:16], b=x[16:32])
    assert only(b)[1] == Cost(2 * 3 * 16 * 4, 3 * 16 * 4, 3 * 16)


def test_a_barrier_costs_nothing_and_totals_are_sums():
    graph = decoder()
    parts = [cost(node, graph, KEY, 40) for node in graph.nodes]
    assert graph_cost(graph, KEY, 40) == sum(parts, Cost())
    barriers = [c for c, n in zip(parts, graph.nodes, strict=True) if n.opcode is Opcode.BARRIER]
    assert barriers == [Cost(), Cost()]


def test_twice_the_tokens_is_twice_the_work_on_the_same_weights():
    graph = decoder()
    one, two = (graph_cost(graph, ShapeKey(n, n), 40) for n in (4, 8))
    assert two.flops == 2 * one.flops
    assert one.bytes_read < two.bytes_read < 2 * one.bytes_read


def test_index_outputs_count_four_bytes():
    b = GraphBuilder("g")
    b.emit(
        Opcode.VERIFY_K, token=b.request("token", "rows"),
        output_rows=b.request("output_rows", "rows"), query=b.request("query", "tokens", 4),
        step=b.request("step", 1, 4), ring=b.output("ring", 16, 8, dtype=I32), draft_tokens=3,
    )  # fmt: skip
    # Of two rows each reads its token, its index, two records of the query and the step's.
    assert only(b)[1] == Cost(2 * (1 + 1 + 8) * 4 + 4 * 4 + 2 * 4, 2 * 4, 0)
