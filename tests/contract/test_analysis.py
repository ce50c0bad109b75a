"""What counts say of a graph, on graphs small enough to count by hand."""

import pytest

from contract.dtypes import F16, F32, Q4_0
from contract.ir.analysis import (
    CriticalPath,
    FeedForward,
    LayerKind,
    Machine,
    Mixer,
    PathPart,
    Share,
    StepBytes,
    Storage,
    critical_path,
    fold_path,
    layer_kinds,
    node_costs,
    op_mix,
    role_mix,
    step_bytes,
    weight_storage,
)
from contract.ir.cost import Cost, graph_cost
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.contract.graphs import decoder, weight
from tests.contract.model_graphs import TINY, Decoder, hybrid, slider

KEY = ShapeKey(1, 1)
BY_BYTES = Machine(bytes_per_second=1.0, flops_per_second=1e9)
BY_FLOPS = Machine(bytes_per_second=1e9, flops_per_second=1.0)


def diamond() -> Graph:
    """start, then a product beside a scaling, joined by an addition.

    Rows of 8 binary32: a scaling moves 64 bytes and computes 8 FLOPs, the product of an 8 x 8
    matrix 32 + 256 + 32 bytes and 2 * 8 * 8 FLOPs, the addition 96 bytes and 8 FLOPs."""
    b = GraphBuilder("diamond")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8))
    start = b.emit(Opcode.SCALE, "start", x=x, factor=2.0)
    product = b.emit(Opcode.MATMUL, "product[0]", x=start, weight=weight(b, "w", 8, 8))
    scaled = b.emit(Opcode.SCALE, "scaled[0]", x=start, factor=3.0)
    b.emit(Opcode.ADD, "join[1]", a=product, b=scaled, y=b.output("y", "tokens", 8))
    return b.build()


DIAMOND = diamond()
COSTS = node_costs(DIAMOND, KEY, 1)


def test_the_diamond_is_counted_as_its_docstring_says():
    assert [(c.bytes_moved, c.flops) for c in COSTS] == [(64, 8), (320, 128), (64, 8), (96, 8)]


def test_op_mix_sums_an_opcode_and_puts_most_bytes_first():
    assert op_mix(DIAMOND, COSTS) == (
        Share("MATMUL", "MATMUL", 1, Cost(288, 32, 128)),
        Share("SCALE", "SCALE", 2, Cost(64, 64, 16)),
        Share("ADD", "ADD", 1, Cost(64, 32, 8)),
    )


def test_role_mix_folds_layers_and_nothing_else():
    graph = decoder(3)
    roles = {share.name: share.nodes for share in role_mix(graph, node_costs(graph, KEY, 40))}
    assert roles["layer[*].q"] == roles["layer[*].attention"] == 3
    assert roles["lm_head"] == 1
    assert sum(roles.values()) == len(graph.nodes)


def test_critical_path_takes_the_slower_branch():
    assert critical_path(DIAMOND, COSTS, BY_BYTES) == CriticalPath((0, 1, 3), 480.0, 544.0)
    assert critical_path(DIAMOND, COSTS, BY_FLOPS) == CriticalPath((0, 1, 3), 144.0, 152.0)


def test_critical_path_takes_the_other_branch_when_that_is_slower():
    costs = [*COSTS[:2], Cost(1000, 0, 0), COSTS[3]]
    assert critical_path(DIAMOND, costs, BY_BYTES).nodes == (0, 2, 3)


def test_a_node_takes_the_longer_of_its_bytes_and_its_flops():
    """At 4 bytes and 2 FLOPs a second the ridge is half a FLOP a byte."""
    machine = Machine(4.0, 2.0)
    assert machine.ridge == 0.5
    assert machine.seconds(Cost(30, 10, 10)) == 10.0
    assert machine.seconds(Cost(30, 10, 100)) == 50.0


def test_critical_path_ends_where_it_takes_longest_and_not_at_the_last_node():
    b = GraphBuilder("two ends")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8))
    y = b.output("y", "tokens", 8)
    b.emit(Opcode.MATMUL, "slow", x=x, weight=weight(b, "w", 8, 8), y=y)
    b.emit(Opcode.SCALE, "quick", x=x, factor=2.0, y=b.output("z", "tokens", 8))
    graph = b.build()
    path = critical_path(graph, node_costs(graph, KEY, 1), BY_BYTES)
    assert path == CriticalPath((0,), 320.0, 384.0)


def test_fold_path_keeps_the_order_and_the_seconds():
    path = critical_path(DIAMOND, COSTS, BY_BYTES)
    assert fold_path(DIAMOND, path, COSTS, BY_BYTES) == (
        PathPart((), ("SCALE",), 64.0),
        PathPart((0,), ("MATMUL",), 320.0),
        PathPart((1,), ("ADD",), 96.0),
    )


@pytest.mark.parametrize(
    ("graph", "layers"), [(slider(), [(0, 1, 2, 3)]), (hybrid(), [(0, 1, 2), (3,)])]
)
def test_fold_path_joins_layers_with_the_same_opcodes(graph, layers):
    costs = node_costs(graph, KEY, 1)
    path = critical_path(graph, costs, BY_BYTES)
    parts = fold_path(graph, path, costs, BY_BYTES)
    assert [part.layers for part in parts] == [(), *layers, ()]
    assert parts[0].opcodes == ("EMBED",)
    assert parts[-1].opcodes == ("SELECT_ROWS", "RMS_NORM", "LM_HEAD")
    assert sum(part.seconds for part in parts) == path.seconds < path.serial_seconds


def test_step_bytes_by_holder():
    """One token attends 40 positions of 2 heads of 16 elements, and passes a convolution.

    Keys and values: 40 * 2 * 2 * 16 of 2 bytes. Queries and result 256 bytes each, 3 pages and
    one query record of 16 bytes. The convolution of 8 channels: 3 earlier tokens read and
    written, 8 x 4 taps, 32 bytes in, 32 out and the query record again."""
    b = GraphBuilder("g")
    query = b.request("query", "tokens", 4)
    b.emit(
        Opcode.FLASH_ATTN_BATCHED, q=b.buffer("q", BufferKind.REQUEST, F32, ("tokens", 64)),
        kv=b.buffer("kv", BufferKind.STATE, F16, (9, 2, 16, 2, 16)),
        page_table=b.request("pages", 1, 8), query=query, heads=4, kv_heads=2, head_dim=16,
        scale=0.25, y=b.output("attended", "tokens", 64),
    )  # fmt: skip
    b.emit(
        Opcode.SSM_CONV1D, x=b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8)),
        weight=weight(b, "taps", 8, 4), query=query,
        state=b.buffer("state", BufferKind.STATE, F32, (1, 3, 8)), history=3,
        y=b.output("y", "tokens", 8),
    )  # fmt: skip
    found = step_bytes(b.build(), KEY, 40)
    assert found == StepBytes(
        weights=8 * 4 * 4, kv=40 * 2 * 2 * 16 * 2, state=2 * 3 * 8 * 4,
        activations=(256 + 256 + 3 * 4 + 16) + (32 + 32 + 16),
    )  # fmt: skip


@pytest.mark.parametrize("graph", [decoder(), hybrid(), slider()])
def test_step_bytes_are_those_of_the_graph(graph):
    key = ShapeKey(3, 2)
    assert step_bytes(graph, key, 40).total == graph_cost(graph, key, 40).bytes_moved


def test_weight_storage_counts_a_shared_tensor_once():
    """64 x 32 in Q4_0 is 64 blocks of 18 bytes; the second buffer holds the same tensor."""
    b = GraphBuilder("tied")
    query = b.request("query", "tokens", 4)
    table = b.buffer("embed", BufferKind.WEIGHT, Q4_0, (64, 32), source="token_embd.weight")
    head = b.buffer("head", BufferKind.WEIGHT, Q4_0, (64, 32), source="token_embd.weight")
    x = b.emit(Opcode.EMBED, query=query, table=table)
    h = b.emit(Opcode.RMS_NORM, x=x, weight=weight(b, "norm", 32), eps=1e-6)
    b.emit(Opcode.MATMUL, x=h, weight=head, y=b.output("y", "tokens", 64))
    assert weight_storage(b.build()) == (
        Storage("q4_0", 1, 64 * 32, 64 * 18),
        Storage("f32", 1, 32, 32 * 4),
    )


def test_layers_of_a_hybrid_with_experts():
    """Its sigmoid-gated outputs are no feed-forward: every layer is MoE and nothing else."""
    delta = [LayerKind(n, Mixer.DELTA_NET, FeedForward.MOE, 0) for n in range(3)]
    assert layer_kinds(hybrid()) == (*delta, LayerKind(3, Mixer.FULL, FeedForward.MOE, 0))


def test_layers_of_a_slider():
    slide = [LayerKind(n, Mixer.SLIDING, FeedForward.DENSE, 64) for n in range(3)]
    assert layer_kinds(slider()) == (*slide, LayerKind(3, Mixer.FULL, FeedForward.DENSE, 0))


def test_a_layer_may_have_both_feed_forwards_or_none():
    model = Decoder("g", TINY, Q4_0)
    model.experts(0)
    model.dense(0)
    model.attention(1)
    assert layer_kinds(model.build()) == (
        LayerKind(0, Mixer.NONE, FeedForward.MOE_AND_DENSE, 0),
        LayerKind(1, Mixer.FULL, FeedForward.NONE, 0),
    )
