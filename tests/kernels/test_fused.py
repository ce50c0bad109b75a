"""Ops of work-groups that stand for several: which runs become one, and that no bit changes."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.packets.fused import fuse, operands_of
from accel.packets.fused_ops import FUSED
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.step import PRODUCTS, Step
from accel.vulkan import tier as vulkan_tier
from contract.dtypes import F32, I12, Q4_K, Q6_K
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Tier
from reference.limits import whole_contexts
from reference.model.open import open_model
from tests.cuda.test_head_rows import head_values, heads_graph
from tests.families_table import FAMILIES
from tests.run_graph import run_graph
from tests.tiers.ways import WAYS

SyntheticModel = Callable[..., Path]
HIDDEN = 512
ROWS = 96


def lowered(graph: Graph, bucket: ShapeKey) -> Step:
    return lower_graph(graph, bucket, 64, "opencl")


def names(step: Step) -> Counter[str]:
    return Counter(op.name for op in step.ops)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_dense_layer_becomes_few_launches(synthetic_model, tokens):
    """Ten waits a layer of Qwen3, nine where attention is not cut in parts. Of 40 tokens the last
    layer has one row behind its attention, as the logits."""
    model = open_model(synthetic_model(quant="q4_k_m", **FAMILIES["qwen3"]))
    graph = model.graph(whole_contexts(1, 200, I12, 64, 1))
    step = lowered(graph, ShapeKey(tokens, 1))
    layers, together = model.config.layers, fuse(step)
    found = names(together)
    assert found["head_rows"] == found["swiglu_quantize"] == layers
    assert found["rms_norm_quantize"] == 2 * layers + 1
    assert not {"add", "rope", "kv_write_batched", "swiglu", "rms_norm"} & set(found)
    assert found["matmul_row"] == {1: 7 * layers + 1, 3: 1, 40: 4 + 1}[tokens]
    split = tokens <= 4
    assert found["flash_attn_quantize"] == (layers if split else 0)
    assert found["quantize_activation"] == (0 if split else layers)
    products = [op for op in together.ops if op.name in PRODUCTS]
    added = [op for op in products if operands_of(op)["residual"] is not None]
    assert len(added) == 2 * layers
    barriers = schedule_levels(together).barriers
    assert schedule_levels(step).barriers > 1.6 * barriers


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma3", "qwen3moe"])
def test_nothing_is_lost(synthetic_model, name):
    """Whatever outlives the step is written as often, and every operand read is written before."""
    model = open_model(synthetic_model(quant="q8_0", **FAMILIES[name]))
    graph = model.graph(whole_contexts(2, 200, I12, 64, 2))
    for bucket in (ShapeKey(1, 1), ShapeKey(4, 2), ShapeKey(60, 2)):
        step = lowered(graph, bucket)
        together = fuse(step)
        assert written(step, graph) == written(together, graph)
        made: set[str] = set()
        for op in together.ops:
            for index, tensor in enumerate(op.operands):
                if tensor is not None and tensor.buffer in together.scratch:
                    assert index in op.written or tensor.buffer in made
            made |= op.results()


def written(step: Step, graph: Graph) -> Counter[str]:
    """How often each buffer of the graph that is no scratch is written."""
    return Counter(name for op in step.ops for name in op.results() if name not in step.scratch)


def layer(also_reads: str) -> Graph:
    """Norm, two products and their gate, a residual; what ``also_reads`` names is an output too."""
    builder = GraphBuilder("layer")

    def weight(name: str, *shape: int) -> View:
        dtype = F32 if len(shape) == 1 else Q6_K if name == "down" else Q4_K
        return builder.buffer(name, BufferKind.WEIGHT, dtype, shape, name)

    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", HIDDEN))
    between = {"norm": builder.emit(Opcode.RMS_NORM, x=x, weight=weight("n", HIDDEN), eps=1e-5)}
    gate, up = (
        builder.emit(Opcode.MATMUL, x=between["norm"], weight=weight(name, HIDDEN, HIDDEN))
        for name in ("gate", "up")
    )
    between["gated"] = builder.emit(Opcode.SWIGLU, gate=gate, up=up, activation=1)
    between["down"] = builder.emit(
        Opcode.MATMUL, x=between["gated"], weight=weight("down", HIDDEN, HIDDEN)
    )
    builder.emit(Opcode.ADD, y=builder.output("y", "tokens", HIDDEN), a=x, b=between["down"])
    if also_reads:
        seen = builder.output("seen", "tokens", HIDDEN)
        builder.emit(Opcode.SCALE, y=seen, x=between[also_reads], factor=2.0)
    return builder.build()


def contents(tokens: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(5)
    made: dict[str, NDArray[Any]] = {
        "x": rng.standard_normal((tokens, HIDDEN)).astype(np.float32),
        "n": rng.standard_normal((1, HIDDEN)).astype(np.float32),
    }
    for name, dtype in (("gate", Q4_K), ("up", Q4_K), ("down", Q6_K)):
        blocks = rng.integers(0, 256, (HIDDEN, HIDDEN // 256, dtype.block_bytes), np.uint8)
        halves = (0, 2) if dtype == Q4_K else (208,)
        for at in halves:
            scale = rng.random((HIDDEN, HIDDEN // 256, 1)).astype(np.float16) / np.float16(64)
            blocks[..., at : at + 2] = scale.view(np.uint8)
        made[name] = blocks.reshape(HIDDEN, -1)
    return made


@pytest.fixture(scope="module")
def tier(kernel_cache) -> Iterator[Tier]:
    with WAYS["vulkan"].opening(kernel_cache) as open_it, open_it() as opened:
        yield opened


@pytest.mark.parametrize("also_reads", ["", "norm", "gated", "down"])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_the_bits_are_those_of_the_ops_apart(tier, monkeypatch, also_reads, tokens):
    """Also where something else reads what would not be written any more."""
    graph = layer(also_reads)
    run = partial(run_graph, tier, graph, ShapeKey(tokens, 0), contents(tokens))
    together = names(fuse(lowered(graph, ShapeKey(tokens, 0))))
    assert together["swiglu_quantize"] == (also_reads != "gated")
    assert together["add"] == (also_reads == "down")
    assert together["rms_norm_quantize"] == 1
    fused = run()
    monkeypatch.setattr(vulkan_tier, "fuse", lambda step, *_, **__: step)
    apart = run()
    assert {*fused} == {*apart} >= {"y"}
    for name, data in apart.items():
        found = fused[name].view(np.float32)
        assert np.isfinite(found).all()
        assert found.any()
        assert (found == data.view(np.float32)).all(), name


@pytest.mark.parametrize("dtype", [Q4_K, Q6_K], ids=str)
@pytest.mark.parametrize("segments", [3, 24, 29])
def test_a_token_by_rows_of_any_length(tier, monkeypatch, segments, dtype):
    """Fewer segments than a group shares out, all it has room for, and more than that."""
    builder = GraphBuilder("product")
    columns = 256 * segments
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    weight = builder.buffer("w", BufferKind.WEIGHT, dtype, (ROWS + 5, columns), "w")
    builder.emit(Opcode.MATMUL, y=builder.output("y", "tokens", ROWS + 5), x=x, weight=weight)
    rng = np.random.default_rng(segments)
    blocks = rng.integers(0, 256, (ROWS + 5, segments, dtype.block_bytes), np.uint8)
    for at in (0, 2) if dtype == Q4_K else (208,):
        scale = rng.random((ROWS + 5, segments, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scale.view(np.uint8)
    data = {
        "x": rng.standard_normal((1, columns)).astype(np.float32),
        "w": blocks.reshape(ROWS + 5, -1),
    }
    graph, bucket = builder.build(), ShapeKey(1, 0)
    assert names(fuse(lowered(graph, bucket)))["matmul_row"] == 1
    row = run_graph(tier, graph, bucket, data)["y"].view(np.float32)
    monkeypatch.setattr(vulkan_tier, "fuse", lambda step, *_, **__: step)
    assert np.isfinite(row).all()
    assert (row == run_graph(tier, graph, bucket, data)["y"].view(np.float32)).all()


@pytest.mark.parametrize(
    ("head_dim", "neox", "pairs"), [(128, 1, 64), (320, 1, 152), (512, 0, 256), (64, 0, 24)]
)
def test_heads_of_any_size_have_the_bits_of_the_ops_apart(tier, monkeypatch, head_dim, neox, pairs):
    """Of one segment and of two, turned as a whole or in part."""
    graph, bucket = heads_graph(head_dim, neox, True, pairs), ShapeKey(5, 0)
    rng = np.random.default_rng(head_dim)
    width = int(graph.buffers["qkv"].shape[-1])
    data: dict[str, NDArray[Any]] = head_values(rng, 5, head_dim, pairs)
    data["qkv"] = rng.standard_normal((5, width)).astype(np.float32)
    assert names(fuse(lowered(graph, bucket))) == {"head_rows": 1}
    together = run_graph(tier, graph, bucket, data)["q"].view(np.float32)
    monkeypatch.setattr(vulkan_tier, "fuse", lambda step, *_, **__: step)
    assert np.isfinite(together).all()
    assert (together == run_graph(tier, graph, bucket, data)["q"].view(np.float32)).all()


@pytest.mark.parametrize(("first", "together"), [(4, 1), (2, 0)])
def test_a_gate_is_read_by_whole_vectors(first, together):
    """One that begins within a vector stays apart."""
    builder = GraphBuilder("gate")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", HIDDEN))
    weight = builder.buffer("w", BufferKind.WEIGHT, Q4_K, (2 * HIDDEN + 8, HIDDEN), "w")
    both = builder.emit(Opcode.MATMUL, x=x, weight=weight)
    gate, up = (both[k : k + HIDDEN] for k in (first, first + HIDDEN))
    gated = builder.emit(Opcode.SWIGLU, gate=gate, up=up, activation=0)
    down = builder.buffer("down", BufferKind.WEIGHT, Q6_K, (HIDDEN, HIDDEN), "down")
    builder.emit(Opcode.MATMUL, y=builder.output("y", "tokens", HIDDEN), x=gated, weight=down)
    step = fuse(lowered(builder.build(), ShapeKey(20, 0)))
    assert names(step)["swiglu_quantize"] == together


def test_a_residual_that_is_the_product_itself_stays_apart():
    """y + y has no other operand to add."""
    builder = GraphBuilder("twice")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", HIDDEN))
    weight = builder.buffer("w", BufferKind.WEIGHT, Q4_K, (ROWS, HIDDEN), "w")
    y = builder.emit(Opcode.MATMUL, x=x, weight=weight)
    builder.emit(Opcode.ADD, y=builder.output("y", "tokens", ROWS), a=y, b=y)
    assert names(fuse(lowered(builder.build(), ShapeKey(2, 0))))["add"] == 1


def test_every_fused_op_has_a_kernel():
    """Named as the op is."""
    for name, op in FUSED.items():
        assert op.name == op.source == name
        assert op.by_groups
