"""Norms, rotation and KV write as one launch, on an emulated block, against the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.cuda import head_rows
from accel.cuda.plan import plan_launches
from accel.packets.rules import lower_graph
from contract.dtypes import F16, F32, I12, I32, Q8_0, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from reference.exact.kv_storage import page_view
from reference.ops.rms_norm_fused_rope_kv_write import rms_norm_fused_rope_kv_write
from tests.cuda.emulated_step import DEVICE, aligned_memory, in_device_memory, run_step

HEADS, KV_HEADS, CONTEXT, PAGES, SLOTS = 4, 2, 64, 9, 2


@pytest.fixture(autouse=True)
def every_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever storage pages are."""
    monkeypatch.setattr(head_rows, "STORAGES", (F32, F16, Q8_0, I12))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "neox", "norms"),
    [
        (F32, 320, 1, True),
        (F16, 64, 0, False),
        (Q8_0, 96, 1, True),
        (I12, 128, 1, True),
        (I12, 64, 0, False),
    ],
    ids=str,
)
def test_queries_and_pages_are_those_of_the_definition(
    kv_dtype: DType, head_dim: int, neox: int, norms: bool, tokens: int, folder: Path
) -> None:
    """One launch; rows of zeros, a large one and, in the last head, a broken one included."""
    compare(kv_dtype, head_dim, neox, norms, tokens, head_dim // 2 - 8, folder)


@pytest.mark.parametrize(
    ("head_dim", "norms", "most"), [(128, True, 70), (64, False, 65), (256, True, 65)]
)
def test_a_block_takes_a_token_where_there_are_many(
    head_dim: int, norms: bool, most: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows in registers, all or some at once; only where all channels are turned, those half a
    row apart together."""
    graph, form = heads_graph(I12, head_dim, 1, norms, head_dim // 2), ShapeKey(most, 0)
    plans = [plan_launches(lower_graph(graph, form, 1, "cuda").ops, DEVICE)]
    for neox, pairs in ((0, head_dim // 2), (1, head_dim // 2 - 8)):
        other = heads_graph(I12, head_dim, neox, norms, pairs)
        plans.append(plan_launches(lower_graph(other, form, 1, "cuda").ops, DEVICE))
    entries = [launch.entry for plan in plans for launch in plan.launches]
    assert entries == ["head_tokens", "head_rows", "head_rows"]
    compare(I12, head_dim, 1, norms, 34, head_dim // 2, folder, most)
    monkeypatch.setattr(head_rows, "TOKEN_WARPS", 3)
    monkeypatch.setattr(head_rows, "TOKEN_CHANNELS", 2 * head_dim)
    compare(I12, head_dim, 1, norms, 34, head_dim // 2, folder, most)


def compare(
    kv_dtype: DType,
    head_dim: int,
    neox: int,
    norms: bool,
    tokens: int,
    pairs: int,
    folder: Path,
    most: int = 0,
) -> None:
    """What a form of ``most`` tokens makes with what the definition does."""
    rng = np.random.default_rng(head_dim + tokens)
    width = (HEADS + 2 * KV_HEADS) * head_dim
    values = {
        "qkv": rng.standard_normal((tokens, width)).astype(np.float32),
        "q_norm": rng.standard_normal(head_dim).astype(np.float32),
        "k_norm": rng.standard_normal(head_dim).astype(np.float32),
        "rope_table": rng.uniform(-1, 1, (CONTEXT, 2, pairs)).astype(np.float32),
        "page_table": rng.permutation(PAGES)[: SLOTS * 4].reshape(SLOTS, 4).astype(np.int32),
    }
    values["qkv"][0, HEADS * head_dim : (HEADS + 1) * head_dim] = 0
    values["qkv"][-1, -3 * head_dim : -2 * head_dim] *= 1e6
    values["qkv"][-1, -1] = np.inf
    query = np.zeros(tokens, QUERY_TOKEN)
    query["slot"], query["position"] = 1, 14 + np.arange(tokens)
    values["query"] = query.view(np.int32).reshape(tokens, 4)
    kinds = dict.fromkeys(("qkv", "query", "page_table"), BufferKind.REQUEST)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": head_dim, "neox": neox}
    shape = (PAGES, 2, 16, KV_HEADS, head_dim)
    graph, key = heads_graph(kv_dtype, head_dim, neox, norms, pairs), ShapeKey(tokens, 0)
    form = ShapeKey(max(tokens, most), 0)
    nbytes = buffer_bytes(graph.buffers["kv"], key)
    kept = {
        "q": aligned_memory(form.tokens * HEADS * head_dim * 4).view(np.float32),
        "kv": aligned_memory(nbytes),
        "rope_table": in_device_memory(values["rope_table"]),
        "q_norm": in_device_memory(values["q_norm"]),
        "k_norm": in_device_memory(values["k_norm"]),
    }
    kept["kv"][:] = 0
    run_step(graph, (key, form), {n: values[n] for n in kinds}, kept, {}, folder)
    want_kv = np.zeros(nbytes, np.uint8)
    weights = {name: values[name] for name in ("q_norm", "k_norm") if norms}
    with np.errstate(invalid="ignore", over="ignore"):
        want = rms_norm_fused_rope_kv_write(
            **{name: values[name] for name in ("qkv", "rope_table", "query", "page_table")},
            **weights,
            **sizes,
            kv=page_view(want_kv, kv_dtype, shape),
            eps=1e-6,
        )
    got = kept["q"].reshape(-1, *want.shape[1:])[:tokens]
    assert np.array_equal(got, want, equal_nan=True)
    got_kv = page_view(kept["kv"], kv_dtype, shape)
    assert got_kv.tobytes() == page_view(want_kv, kv_dtype, shape).tobytes()
    assert want_kv.any()


def heads_graph(kv_dtype: DType, head_dim: int, neox: int, norms: bool, pairs: int) -> Graph:
    """The fused opcode alone, which is lowered as its parts."""
    width, shape = (HEADS + 2 * KV_HEADS) * head_dim, (PAGES, 2, 16, KV_HEADS, head_dim)
    builder = GraphBuilder("heads")
    views = {
        "qkv": builder.buffer("qkv", BufferKind.REQUEST, F32, ("tokens", width)),
        "q_norm": builder.buffer("q_norm", BufferKind.WEIGHT, F32, (head_dim,)),
        "k_norm": builder.buffer("k_norm", BufferKind.WEIGHT, F32, (head_dim,)),
        "rope_table": builder.buffer("rope_table", BufferKind.CONSTANT, F32, (CONTEXT, 2, pairs)),
        "query": builder.buffer("query", BufferKind.REQUEST, I32, ("tokens", 4)),
        "page_table": builder.buffer("page_table", BufferKind.REQUEST, I32, (SLOTS, 4)),
        "kv": builder.buffer("kv", BufferKind.STATE, kv_dtype, shape),
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
