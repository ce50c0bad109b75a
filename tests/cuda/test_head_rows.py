"""Norms, rotation and KV write as one launch, on an emulated block, against the definition."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.plan import plan_launches
from accel.packets.rules import lower_graph
from contract.dtypes import F32, I12, I32, Q4_K, Q6_K, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from reference.exact.kv_storage import page_view
from reference.ops.rms_norm_fused_rope_kv_write import rms_norm_fused_rope_kv_write
from reference.quant.dot import matmul
from tests.cuda.emulated_step import aligned_memory, in_device_memory, run_step
from tests.cuda.product_cases import WIDE, activations, weights

HEADS, KV_HEADS, CONTEXT, PAGES, SLOTS = 4, 2, 64, 9, 2


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("head_dim", "neox", "norms"), [(320, 1, True), (128, 1, True), (64, 0, False)], ids=str
)
def test_queries_and_pages_are_those_of_the_definition(
    head_dim: int, neox: int, norms: bool, tokens: int, folder: Path
) -> None:
    """One launch; rows of zeros, a large one and, in the last head, a broken one included."""
    pairs = head_dim // 2 - 8
    rng = np.random.default_rng(head_dim + tokens)
    width = (HEADS + 2 * KV_HEADS) * head_dim
    values = head_values(rng, tokens, head_dim, pairs)
    values["qkv"] = qkv = rng.standard_normal((tokens, width)).astype(np.float32)
    qkv[0, HEADS * head_dim : (HEADS + 1) * head_dim] = 0
    qkv[-1, -3 * head_dim : -2 * head_dim] *= 1e6
    qkv[-1, -1] = np.inf
    graph, key = heads_graph(head_dim, neox, norms, pairs), ShapeKey(tokens, 0)
    kept = kept_buffers(graph, values, key)
    inputs = {name: values[name] for name in ("qkv", "query", "page_table")}
    run_step(graph, (key, key), inputs, kept, {}, folder)
    assert_as_defined(kept, values, neox, norms)


@pytest.mark.parametrize(("tokens", "bucket"), [(21, 24), (9, 16)])
@pytest.mark.parametrize(("v_dtype", "biased"), [(Q4_K, False), (Q6_K, True)], ids=str)
def test_heads_add_up_spans_of_products(
    v_dtype: DType, biased: bool, tokens: int, bucket: int, folder: Path
) -> None:
    """Where blocks of q, k and v share rows, in one launch or, with v of another format, in two.

    The last span has one unit, and the form more tokens than the step."""
    columns, head_dim = 5 * 1024 + 256, 64
    rng = np.random.default_rng(7)
    values = head_values(rng, tokens, head_dim, head_dim // 2)
    inputs = {name: values[name] for name in ("query", "page_table")}
    inputs["x"] = activations(tokens, columns, 3)
    builder = GraphBuilder("projected")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    width = (HEADS + 2 * KV_HEADS) * head_dim
    qkv = builder.scratch("qkv", "tokens", width)
    values["qkv"] = np.zeros((tokens, width), np.float32)
    matrices, biases, start = {}, {}, 0
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        rows, dtype = heads * head_dim, v_dtype if name == "v" else Q4_K
        part = slice(start, start + rows)
        stored = weights(dtype, rows, columns, start)
        matrices[f"w{name}"] = dtype, stored
        values["qkv"][:, part] = matmul(stored, dtype, inputs["x"])
        weight = builder.buffer(f"w{name}", BufferKind.WEIGHT, dtype, (rows, columns))
        result = None if biased else qkv[part]
        product = builder.emit(Opcode.MATMUL, x=x, weight=weight, y=result)
        if biased:
            biases[f"b{name}"] = rng.standard_normal(rows).astype(np.float32)
            values["qkv"][:, part] += biases[f"b{name}"]
            bias = builder.buffer(f"b{name}", BufferKind.WEIGHT, F32, (rows,))
            builder.emit(Opcode.BIAS_ADD, x=product, bias=bias, y=qkv[part])
        start += rows
    graph = emit_heads(builder, qkv, head_dim, 1, True, head_dim // 2)
    sizes = ShapeKey(tokens, 0), ShapeKey(bucket, 0)
    step = lower_graph(graph, sizes[1], 1, "cuda")
    plan = plan_launches(step.ops, WIDE, step.scratch)
    products = ["unit_groups"] * (1 + (v_dtype is not Q4_K)) if bucket > 16 else ["unit_spans"]
    assert [launch.entry for launch in plan.launches] == ["unit_pack", *products, "head_rows"]
    assert all(dict(launch.source.macros)["PARTS"] > 1 for launch in plan.launches[1:-1])
    assert plan.transient_bytes == 4 * 6 * bucket * width
    kept = kept_buffers(graph, values, sizes[1])
    kept |= {name: in_device_memory(bias) for name, bias in biases.items()}
    run_step(graph, sizes, inputs, kept, matrices, folder, device=WIDE)
    assert_as_defined(kept, values, 1, True)


def head_values(
    rng: np.random.Generator, tokens: int, head_dim: int, pairs: int
) -> dict[str, NDArray[Any]]:
    """What heads are made with, but their rows: tokens of one slot from the end of a page on."""
    query = np.zeros(tokens, QUERY_TOKEN)
    query["slot"], query["position"] = 1, 14 + np.arange(tokens)
    return {
        "q_norm": rng.standard_normal(head_dim).astype(np.float32),
        "k_norm": rng.standard_normal(head_dim).astype(np.float32),
        "rope_table": rng.uniform(-1, 1, (CONTEXT, 2, pairs)).astype(np.float32),
        "page_table": rng.permutation(PAGES)[: SLOTS * 4].reshape(SLOTS, 4).astype(np.int32),
        "query": query.view(np.int32).reshape(tokens, 4),
    }


def kept_buffers(
    graph: Graph, values: Mapping[str, NDArray[Any]], key: ShapeKey
) -> dict[str, NDArray[Any]]:
    """Those that outlive a step."""
    kv = aligned_memory(buffer_bytes(graph.buffers["kv"], key))
    kv[:] = 0
    width = int(graph.buffers["q"].shape[-1])
    results: dict[str, NDArray[Any]] = {"kv": kv}
    results["q"] = aligned_memory(key.tokens * width * 4).view(np.float32)
    constants = ("rope_table", "q_norm", "k_norm")
    return results | {name: in_device_memory(values[name]) for name in constants}


def assert_as_defined(
    kept: Mapping[str, NDArray[Any]], values: Mapping[str, NDArray[Any]], neox: int, norms: bool
) -> None:
    """Queries and pages, of the tokens there are."""
    head_dim = len(values["q_norm"])
    shape = (PAGES, 2, 16, KV_HEADS, head_dim)
    want_kv = np.zeros(len(kept["kv"]), np.uint8)
    weights = {name: values[name] for name in ("q_norm", "k_norm") if norms}
    with np.errstate(invalid="ignore", over="ignore"):
        want = rms_norm_fused_rope_kv_write(
            **{name: values[name] for name in ("qkv", "rope_table", "query", "page_table")},
            **weights,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=head_dim,
            neox=neox,
            kv=page_view(want_kv, I12, shape),
            eps=1e-6,
        )
    got = kept["q"][: want.size].reshape(want.shape)
    assert np.array_equal(got, want, equal_nan=True)
    got_kv = page_view(kept["kv"], I12, shape)
    assert got_kv.tobytes() == page_view(want_kv, I12, shape).tobytes()
    assert want_kv.any()


def heads_graph(head_dim: int, neox: int, norms: bool, pairs: int) -> Graph:
    """The fused opcode alone, which is lowered as its parts."""
    builder, width = GraphBuilder("heads"), (HEADS + 2 * KV_HEADS) * head_dim
    qkv = builder.buffer("qkv", BufferKind.REQUEST, F32, ("tokens", width))
    return emit_heads(builder, qkv, head_dim, neox, norms, pairs)


def emit_heads(
    builder: GraphBuilder, qkv: View, head_dim: int, neox: int, norms: bool, pairs: int
) -> Graph:
    """The graph with the fused opcode of ``qkv`` at its end."""
    shape = (PAGES, 2, 16, KV_HEADS, head_dim)
    views = {
        "qkv": qkv,
        "q_norm": builder.buffer("q_norm", BufferKind.WEIGHT, F32, (head_dim,)),
        "k_norm": builder.buffer("k_norm", BufferKind.WEIGHT, F32, (head_dim,)),
        "rope_table": builder.buffer("rope_table", BufferKind.CONSTANT, F32, (CONTEXT, 2, pairs)),
        "query": builder.buffer("query", BufferKind.REQUEST, I32, ("tokens", 4)),
        "page_table": builder.buffer("page_table", BufferKind.REQUEST, I32, (SLOTS, 4)),
        "kv": builder.buffer("kv", BufferKind.STATE, I12, shape),
        "q": builder.output("q", "tokens", HEADS * head_dim),
    }
    if not norms:
        del views["q_norm"], views["k_norm"]
    builder.emit(
        Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE,
        **views,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        neox=neox,
        eps=1e-6,
    )
    return builder.build()
