"""Heads and attention of few tokens as one launch, on emulated clusters, by the definitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.plan import plan_launches
from accel.cuda.unpacked_pages import unpack_rotated
from accel.packets.rules import lower_graph
from contract.dtypes import F32, I12, I32, ROTATED_KV, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.exact.kv_storage import page_view
from reference.ops.flash_attn_batched import flash_attn_batched
from reference.ops.rms_norm_fused_rope_kv_write import rms_norm_fused_rope_kv_write
from tests.cuda.emulated_step import DEVICE, OLDER, aligned_memory, in_device_memory, run_step
from tests.cuda.test_attention import EVEN, PARTS, SLOT_PAGES, filled_pages, tokens_of
from tests.cuda.test_unpacked_pages import STAND_INS

SLOTS = 2
POOL_PAGES = 2 * SLOT_PAGES
CONTEXT = 16 * SLOT_PAGES
ABSENT_PAGE = -1
FILES = ["attention_clusters.cu"]
LARGE = replace(DEVICE, multiprocessors=132)
"""With clusters for every token, where DEVICE has one that takes them all in turn."""


def heads_and_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    neox: int = 1,
    norms: bool = True,
    pairs: int = 0,
    window: int = 0,
    dtype: DType = I12,
) -> Graph:
    """Both opcodes, whose queries nobody else reads."""
    width, shape = (heads + 2 * kv_heads) * head_dim, (POOL_PAGES, 2, 16, kv_heads, head_dim)
    pairs = pairs or head_dim // 2
    builder = GraphBuilder("heads and attention")
    shared = {
        "query": builder.buffer("query", BufferKind.REQUEST, I32, ("tokens", 4)),
        "page_table": builder.buffer("page_table", BufferKind.REQUEST, I32, (SLOTS, SLOT_PAGES)),
        "kv": builder.buffer("kv", BufferKind.STATE, dtype, shape),
    }
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    rows = {
        "qkv": builder.buffer("qkv", BufferKind.REQUEST, F32, ("tokens", width)),
        "q_norm": builder.buffer("q_norm", BufferKind.WEIGHT, F32, (head_dim,)),
        "k_norm": builder.buffer("k_norm", BufferKind.WEIGHT, F32, (head_dim,)),
        "rope_table": builder.buffer("rope_table", BufferKind.CONSTANT, F32, (CONTEXT, 2, pairs)),
    }
    if not norms:
        del rows["q_norm"], rows["k_norm"]
    q = builder.scratch("q", "tokens", heads * head_dim)
    builder.emit(
        Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE, **shared, **rows, q=q, **sizes, neox=neox, eps=1e-6
    )
    builder.barrier()
    builder.emit(
        Opcode.FLASH_ATTN_BATCHED,
        **shared,
        q=q,
        y=builder.output("y", "tokens", heads * head_dim),
        **sizes,
        scale=head_dim**-0.5,
        window=window,
        soft_cap=0.0,
    )
    return builder.build()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "most", "runs"),
    [
        (4, 1, 128, 0, 1, ((0, 0, 1),)),
        (4, 1, 64, 0, 1, ((1, 63, 1),)),
        (8, 2, 128, 0, 1, ((1, 70, 1),)),
        (4, 1, 128, 0, 1, ((1, 255, 1),)),
        (4, 1, 128, 0, 1, ((0, 256, 1),)),
        (4, 1, 128, 0, 1, ((1, 520, 1),)),
        (6, 1, 64, 0, 1, ((1, 1100, 1),)),
        (4, 1, 256, 0, 1, ((0, 3300, 1),)),
        (3, 1, 256, 0, 1, ((0, 100, 1),)),
        (2, 2, 128, 0, 4, ((1, 2046, 4),)),
        (4, 1, 128, 100, 1, ((0, 1060, 1),)),
        (4, 1, 128, 100, 1, ((0, 1000, 1),)),
        (4, 2, 64, 1024, 4, ((0, 3000, 2), (1, 1023, 2))),
        (4, 1, 128, 0, 4, ((0, 14, 4),)),
        (4, 1, 256, 0, 4, ((0, 62, 4),)),
        (6, 1, 128, 0, 4, ((0, 5, 1), (1, 127, 3))),
        (8, 2, 64, 0, 4, ((1, 0, 2),)),
        (4, 1, 128, 3, 4, ((1, 254, 4),)),
    ],
    ids=str,
)
def test_every_split_has_the_bits_of_the_definitions(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    most: int,
    runs: tuple[tuple[int, int, int], ...],
    folder: Path,
) -> None:
    """One tile to four spans, windows, heads that fill no group, tokens that see each other; pages
    out of sight do not exist."""
    check(heads, kv_heads, head_dim, window, most, runs, folder)


ROTATED = [
    (8, 2, 128, 0, 1, ((1, 70, 1),)),
    (6, 1, 64, 0, 1, ((1, 1100, 1),)),
    (4, 1, 256, 0, 1, ((0, 3300, 1),)),
    (4, 1, 128, 100, 4, ((0, 14, 4),)),
    (6, 1, 128, 0, 4, ((0, 5, 1), (1, 127, 3))),
]


@pytest.mark.parametrize("dtype", ROTATED_KV, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "most", "runs"), ROTATED)
def test_rotated_pages(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    most: int,
    runs: tuple[tuple[int, int, int], ...],
    dtype: DType,
    folder: Path,
) -> None:
    """One launch but for the rotation of results; or, without clusters, the rows of all heads, then
    attention over pages that are unpacked first. A broken row."""
    broken = "key" if heads == 8 else ""
    for device in (None, OLDER):
        check(heads, kv_heads, head_dim, window, most, runs, folder, broken, dtype, device)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotations_of_neighbours_and_of_some_pairs_without_norms(
    head_dim: int, folder: Path
) -> None:
    """The other order of pairs, a part of a row that is not rotated, no norms."""
    shape = {"neox": 0, "norms": False, "pairs": head_dim // 2 - 8}
    check(4, 1, head_dim, 0, 1, ((0, 33, 1),), folder, **shape)


@pytest.mark.parametrize("broken", ["query", "key", "value"])
@pytest.mark.parametrize("position", [20, 600, 1500])
def test_a_broken_row_breaks_its_heads_alone(broken: str, position: int, folder: Path) -> None:
    """Of the token itself."""
    got = check(8, 2, 64, 0, 1, ((0, position, 1),), folder, broken=broken)
    seen = np.isnan(got.reshape(8, 64)).all(axis=1)
    assert seen.tolist() == [False] * 4 + ([False, True] * 2 if broken == "query" else [True] * 4)


def step_values(
    rng: np.random.Generator,
    query: NDArray[Any],
    sizes: tuple[int, int, int],
    pairs: int,
    broken: str,
) -> dict[str, NDArray[Any]]:
    """Weights and activations of a step: large, zero, and not a number where ``broken`` says."""
    heads, kv_heads, head_dim = sizes
    tokens, rows_of = len(query), heads + 2 * kv_heads
    values: dict[str, NDArray[Any]] = {
        "q_norm": rng.standard_normal(head_dim).astype(np.float32),
        "k_norm": rng.standard_normal(head_dim).astype(np.float32),
        "rope_table": rng.uniform(-1, 1, (CONTEXT, 2, pairs)).astype(np.float32),
        "qkv": rng.standard_normal((tokens, rows_of * head_dim)).astype(np.float32),
        "query": query.view(np.int32).reshape(tokens, 4),
    }
    values["q_norm"] *= EVEN
    rows = values["qkv"].reshape(tokens, rows_of, head_dim)
    rows[-1, -1] *= 1e6
    rows[0, heads] *= 0.0 if tokens > 1 else 1.0
    if broken:
        at = {"query": (5, 7), "key": (heads + 1,), "value": (heads + 2 * kv_heads - 1,)}[broken]
        rows[0, at, 3] = np.nan
    return values


def check(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    most: int,
    runs: tuple[tuple[int, int, int], ...],
    folder: Path,
    broken: str = "",
    dtype: DType = I12,
    device: Device | None = None,
    **shape: Any,
) -> NDArray[np.float32]:
    """Attention and pages of one step are those of the definitions. Returns the former."""
    graph = heads_and_attention(heads, kv_heads, head_dim, window=window, dtype=dtype, **shape)
    query, pairs = tokens_of(runs), shape.get("pairs", head_dim // 2)
    key, tokens = ShapeKey(len(query), 0), len(query)
    rng = np.random.default_rng(heads * head_dim + window + int(query["position"][0]))
    values = step_values(rng, query, (heads, kv_heads, head_dim), pairs, broken)
    values["page_table"] = visible_pages(query, window, rng)
    nbytes = buffer_bytes(graph.buffers["kv"], key)
    kept: dict[str, NDArray[Any]] = {
        "kv": aligned_memory(nbytes),
        "y": aligned_memory(most * heads * head_dim * 4).view(np.float32),
        **{name: in_device_memory(values[name]) for name in ("rope_table", "q_norm", "k_norm")},
    }
    kv_shape = (POOL_PAGES, 2, 16, kv_heads, head_dim)
    filled_pages(kept["kv"], kv_shape, rng, dtype)
    want_kv = kept["kv"].copy()
    given = {name: values[name] for name in ("qkv", "query", "page_table")}
    bucket = ShapeKey(most, 0)
    if device is None:
        device = DEVICE if most == 1 else LARGE
        step = unpack_rotated(lower_graph(graph, bucket, PARTS, "cuda"), graph, bucket)
        plan = plan_launches(step.ops, device, step.scratch)
        tuned = [one.source.name for one in plan.launches if one.entry != "launch_rotate_heads"]
        assert tuned == FILES
    run_step(graph, (key, bucket), given, kept, {}, folder, PARTS, device, STAND_INS)
    weights = {name: values[name] for name in ("q_norm", "k_norm") if shape.get("norms", True)}
    pool = page_view(want_kv, dtype, kv_shape)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    with np.errstate(invalid="ignore", over="ignore"):
        q = rms_norm_fused_rope_kv_write(
            **given,
            **weights,
            **sizes,
            rope_table=values["rope_table"],
            neox=shape.get("neox", 1),
            kv=pool,
            eps=1e-6,
        )
    named = {name: values[name] for name in ("query", "page_table")}
    want = flash_attn_batched(**named, **sizes, q=q, kv=pool, scale=head_dim**-0.5, window=window)
    got = kept["y"].reshape(most, -1)[:tokens].reshape(want.shape)
    assert kept["kv"].tobytes() == want_kv.tobytes()
    assert np.array_equal(got, want, equal_nan=True)
    assert broken or np.isfinite(want).all()
    return got


def visible_pages(query: NDArray[Any], window: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """int32[SLOTS, SLOT_PAGES]; pages that no token sees are absent."""
    pages = rng.permutation(POOL_PAGES).astype(np.int32).reshape(SLOTS, SLOT_PAGES)
    for slot in range(SLOTS):
        positions = query["position"][query["slot"] == slot]
        seen = np.zeros(SLOT_PAGES, bool)
        for position in positions:
            first = max(0, position + 1 - window) if window else 0
            seen[first // 16 : position // 16 + 1] = True
        pages[slot, ~seen] = ABSENT_PAGE
    return pages


def test_older_devices_and_more_tokens_take_two_launches() -> None:
    """What has no clusters, and forms whose tokens are taken otherwise."""
    graph = heads_and_attention(4, 1, 128)
    for device, tokens, files in (
        (DEVICE, 1, FILES),
        (OLDER, 1, ["head_rows.cu", "attention_spans.cu"]),
        (replace(DEVICE, shared_bytes=48 << 10), 1, ["head_rows.cu", "attention_spans.cu"]),
        (DEVICE, 16, ["head_rows.cu", "attention_tokens.cu"]),
    ):
        step = lower_graph(graph, ShapeKey(tokens, 0), PARTS, "cuda")
        plan = plan_launches(step.ops, device, step.scratch)
        assert [launch.source.name for launch in plan.launches] == files
