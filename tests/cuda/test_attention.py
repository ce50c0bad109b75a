"""Attention of few tokens over I12 pages, on emulated blocks, against the definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.plan import plain_ops, plan_launches
from accel.packets.rules import lower_graph
from contract.dtypes import F32, I12, I32, Q4_K, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from reference.exact.kv_storage import page_view, store
from reference.ops.flash_attn_batched import flash_attn_batched
from reference.quant import FORMATS
from reference.quant.dot import matmul
from tests.cuda.emulated_step import DEVICE, NO_STAND_INS, OLDER, StandIn, aligned_memory, run_step

SLOTS, SLOT_PAGES = 2, 208
"""3,328 positions: up to four spans, the last of few tiles."""
PARTS = 64
EVEN = np.float32(2.0**-9)
"""Of queries whose positions weigh about the same, so that every tile and span is in the result,
and the order of their sums."""


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention, and the positions that a token sees where they are few."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def width(self) -> int:
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def pool(self) -> tuple[int, ...]:
        """The shape of all pages."""
        return SLOT_PAGES, 2, 16, self.kv_heads, self.head_dim

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the opcode."""
        return {**asdict(self), "scale": self.head_dim**-0.5}


def attention(
    heads: Heads, soft_cap: float = 0.0, weight_rows: int = 0, dtype: DType = I12
) -> Graph:
    """The opcode alone, or in front of a product by a matrix of so many rows."""
    builder = GraphBuilder("attention")
    output = {} if weight_rows else {"y": builder.output("y", "tokens", heads.width)}
    y = builder.emit(
        Opcode.FLASH_ATTN_BATCHED,
        q=builder.buffer("q", BufferKind.REQUEST, F32, ("tokens", heads.width)),
        kv=builder.buffer("kv", BufferKind.STATE, dtype, heads.pool),
        page_table=builder.buffer("page_table", BufferKind.REQUEST, I32, (SLOTS, SLOT_PAGES)),
        query=builder.buffer("query", BufferKind.REQUEST, I32, ("tokens", 4)),
        **output,
        **heads.params,
        soft_cap=soft_cap,
    )
    if weight_rows:
        weight = builder.buffer("w", BufferKind.WEIGHT, Q4_K, (weight_rows, heads.width))
        product = builder.output("y", "tokens", weight_rows)
        builder.emit(Opcode.MATMUL, x=y, weight=weight, y=product)
    return builder.build()


def step_memory(
    graph: Graph, heads: Heads, tokens: int, rng: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Filled pages, and room for the output of so many tokens."""
    key, columns = ShapeKey(tokens, 0), int(graph.buffers["y"].shape[-1])
    memory = {
        "kv": aligned_memory(buffer_bytes(graph.buffers["kv"], key)),
        "y": aligned_memory(tokens * columns * 4).view(np.float32),
    }
    filled_pages(memory["kv"], heads.pool, rng, graph.buffers["kv"].dtype)
    return memory


def words_of(query: NDArray[Any]) -> NDArray[np.int32]:
    """QUERY_TOKEN[tokens] as int32[tokens, 4]."""
    return query.view(np.int32).reshape(len(query), 4)


def by_definition(
    inputs: dict[str, NDArray[Any]], kv: NDArray[Any], heads: Heads, dtype: DType = I12
) -> Any:
    """What the definition gives."""
    return flash_attn_batched(**inputs, kv=page_view(kv, dtype, heads.pool), **heads.params)


def filled_pages(
    raw: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator, dtype: DType = I12
) -> None:
    """Keys and values of very different sizes; the rows of position 70 are zeros."""
    pool = page_view(raw, dtype, shape)
    pages, _, _, kv_heads, head_dim = shape
    for offset in range(16):
        rows = rng.standard_normal((2, pages, kv_heads, head_dim))
        rows *= 2.0 ** rng.integers(-4, 5, (2, pages, kv_heads, 1))
        rows[:, 4] *= offset != 6
        keys, values = rows.astype(np.float32)
        store(pool, np.arange(pages), np.full(pages, offset), keys, values)


@pytest.mark.parametrize(
    ("sizes", "position", "tokens"),
    [
        ((4, 1, 128), 0, 1),
        ((4, 1, 64), 63, 1),
        ((8, 2, 128), 70, 2),
        ((6, 1, 64), 1100, 1),
        ((2, 2, 128), 2047, 3),
        ((4, 1, 256), 3300, 1),
        ((4, 1, 128, 100), 1060, 1),
        ((4, 2, 64, 1024), 3000, 2),
    ],
    ids=str,
)
def test_every_split_has_the_bits_of_the_definition(
    sizes: tuple[int, ...], position: int, tokens: int, folder: Path
) -> None:
    """One tile to four spans, windows, heads that fill no group."""
    check_runs(Heads(*sizes), tokens, ((1, position, tokens),), folder, DEVICE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "most", "runs"),
    [
        (4, 1, 128, 0, 72, ((1, 0, 20),)),
        (8, 2, 128, 0, 72, ((1, 50, 17), (0, 3, 1), (1, 1170, 30))),
        (6, 1, 64, 0, 72, ((0, 1010, 24),)),
        (6, 1, 64, 0, 72, ((0, 3, 20), (1, 2500, 1))),
        (2, 2, 64, 0, 72, ((1, 2040, 20), (0, 0, 1))),
        (4, 1, 256, 0, 72, ((0, 1180, 17),)),
        (6, 1, 256, 0, 72, ((1, 0, 4), (0, 1100, 1))),
        (16, 2, 256, 300, 72, ((0, 1010, 35), (1, 5, 1), (1, 60, 18))),
        (8, 2, 128, -300, 72, ((0, 1185, 35), (1, 5, 1), (1, 60, 18))),
        (3, 1, 128, 100, 72, ((0, 1060, 25), (1, 90, 22))),
        (4, 1, 64, 150, 72, ((1, 1, 40), (0, 1000, 30))),
        (2, 1, 128, 0, 72, ((0, 3, 1), (1, 60, 70), (0, 2100, 1))),
        (4, 2, 64, 1024, 72, ((0, 3000, 17),)),
        (8, 2, 128, 0, 9, ((0, 70, 1), (1, 0, 3), (0, 200, 1))),
        (6, 1, 64, 0, 12, ((0, 0, 1), (1, 1023, 4), (0, 2500, 1))),
        (4, 1, 256, 700, 64, ((0, 0, 1), (1, 1500, 5))),
    ],
    ids=str,
)
def test_blocks_of_many_tokens(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    most: int,
    runs: tuple[tuple[int, int, int], ...],
    folder: Path,
) -> None:
    """Runs of (slot, first position, tokens) of both slots; up to four spans; broken rows. In a
    form of few tokens each is taken by itself, as in a larger one those alone in their slots."""
    check_runs(Heads(heads, kv_heads, head_dim, window), most, runs, folder, DEVICE)


@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "runs"),
    [
        (6, 64, 0, ((0, 1010, 24), (1, 2500, 1))),
        (4, 128, 0, ((1, 50, 17), (0, 3, 1))),
        (3, 128, 100, ((0, 1060, 25), (1, 90, 22))),
        (3, 128, -100, ((0, 1090, 25), (1, 90, 22))),
        (4, 256, 0, ((0, 1180, 17),)),
    ],
    ids=str,
)
def test_blocks_of_single_warps(
    heads: int, head_dim: int, window: int, runs: tuple[tuple[int, int, int], ...], folder: Path
) -> None:
    """Where there are no products of warp groups."""
    sizes = Heads(heads, 1, head_dim, window)
    step = lower_graph(attention(sizes), ShapeKey(72, 0), PARTS, "cuda")
    for device, file in ((OLDER, "attention_blocks.cu"), (DEVICE, "attention_groups.cu")):
        (launch,) = plan_launches(step.ops, device).launches
        assert launch.source.name == file
    check_runs(sizes, 72, runs, folder, OLDER)


@pytest.mark.parametrize(
    ("head_dim", "window", "runs", "warps"),
    [
        (128, 0, ((1, 1, 2), (0, 190, 1), (1, 255, 3)), 16),
        (64, 0, ((0, 1020, 6), (0, 2500, 1)), 16),
        (128, 100, ((0, 1060, 5), (1, 90, 2)), 16),
        (128, -1062, ((0, 1060, 5), (1, 90, 2)), 16),
        (256, 0, ((0, 1023, 3), (1, 5, 2)), 8),
    ],
    ids=str,
)
def test_several_tiles_at_once(
    head_dim: int, window: int, runs: tuple[tuple[int, int, int], ...], warps: int, folder: Path
) -> None:
    """Where there are more multiprocessors than tokens and heads, blocks are as large as can be."""
    sizes, device = Heads(4, 1, head_dim, window), replace(DEVICE, multiprocessors=132)
    step = lower_graph(attention(sizes), ShapeKey(9, 0), PARTS, "cuda")
    (launch,) = plan_launches(step.ops, device).launches
    assert (launch.source.name, launch.threads) == ("attention_tokens.cu", 32 * warps)
    check_runs(sizes, 9, runs, folder, device)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "most", "multiprocessors"),
    [(8, 2, 64, 9, 132), (4, 1, 128, 12, 3), (8, 1, 64, 33, 3)],
    ids=str,
)
def test_rows_are_packed_for_the_product_behind(
    heads: int, kv_heads: int, head_dim: int, most: int, multiprocessors: int, folder: Path
) -> None:
    """One launch less: attention leaves the integers that the product reads."""
    device = replace(DEVICE, multiprocessors=multiprocessors)
    query = tokens_of(((0, 70, 2), (1, 15, 3), (0, 400, 1)))
    sizes, key = Heads(heads, kv_heads, head_dim), ShapeKey(len(query), 0)
    graph, rng = attention(sizes, weight_rows=48), np.random.default_rng(most)
    stored = FORMATS[Q4_K].quantize(rng.standard_normal((48, sizes.width)).astype(np.float32))
    kept = step_memory(graph, sizes, most, rng)
    pages = np.stack([rng.permutation(SLOT_PAGES) for _ in range(SLOTS)]).astype(np.int32)
    inputs: dict[str, NDArray[Any]] = {
        "q": rng.standard_normal((key.tokens, sizes.width)).astype(np.float32),
        "page_table": pages,
        "query": words_of(query),
    }
    inputs["q"][1, 3] = np.inf
    bucket = ShapeKey(most, 0)
    plan = plan_launches(lower_graph(graph, bucket, PARTS, "cuda").ops, device)
    assert "unit_pack" not in [launch.entry for launch in plan.launches]
    matrices = {"w": (Q4_K, stored)}
    run_step(graph, (key, bucket), inputs, kept, matrices, folder, parts=PARTS, device=device)
    made = by_definition(inputs, kept["kv"], sizes)
    want = matmul(stored, Q4_K, made.reshape(key.tokens, sizes.width))
    got = kept["y"].reshape(-1, 48)[: key.tokens]
    assert np.array_equal(got, want, equal_nan=True)


def tokens_of(runs: tuple[tuple[int, int, int], ...]) -> NDArray[Any]:
    """The query of runs of (slot, first position, tokens)."""
    query = np.zeros(sum(run[2] for run in runs), QUERY_TOKEN)
    query["slot"] = np.concatenate([np.full(count, slot) for slot, _, count in runs])
    query["position"] = np.concatenate([first + np.arange(count) for _, first, count in runs])
    return query


def check_runs(
    heads: Heads,
    most: int,
    runs: tuple[tuple[int, int, int], ...],
    folder: Path,
    device: Device,
    dtype: DType = I12,
    stand_ins: Mapping[str, StandIn] = NO_STAND_INS,
) -> None:
    """A step in the form of ``most`` tokens; pages are stored as ``dtype``."""
    graph = attention(heads, dtype=dtype)
    query = tokens_of(runs)
    key = ShapeKey(len(query), 0)
    rng = np.random.default_rng(heads.width + abs(heads.window))
    kept = step_memory(graph, heads, most, rng)
    broken = rng.standard_normal((2, 1, heads.kv_heads, heads.head_dim)).astype(np.float32)
    broken[0, 0, -1, 3] = np.nan
    pages = np.stack([rng.permutation(SLOT_PAGES) for _ in range(SLOTS)]).astype(np.int32)
    for slot, position in zip(query["slot"][-1:], query["position"][-3:-2], strict=False):
        pool, place = page_view(kept["kv"], dtype, heads.pool), pages[slot, position // 16]
        store(pool, np.array([place]), np.array([position % 16]), *broken)
    q = rng.standard_normal((key.tokens, heads.width)).astype(np.float32)
    q[0, : heads.head_dim] *= 100
    q[:, heads.head_dim :] *= EVEN
    q[1 % key.tokens, -1] = np.inf
    q[2 % key.tokens, : heads.head_dim] = 0
    inputs = {"q": q, "page_table": pages, "query": words_of(query)}
    bucket = ShapeKey(most, 0)
    run_step(graph, (key, bucket), inputs, kept, {}, folder, PARTS, device, stand_ins)
    want = by_definition(inputs, kept["kv"], heads, dtype)
    got = kept["y"].reshape(-1, heads.width)[: key.tokens].reshape(want.shape)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.isnan(want).any()
    assert np.isfinite(want[0, : heads.head_dim]).all()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_broken_row_breaks_its_head_alone(broken: int, folder: Path) -> None:
    """The key or value of one KV head at a visible position is not finite."""
    sizes, key, rng = Heads(4, 2, 64), ShapeKey(1, 0), np.random.default_rng(1)
    graph = attention(sizes)
    kept = step_memory(graph, sizes, 1, rng)
    rows = rng.standard_normal((2, 1, 2, 64)).astype(np.float32)
    rows[broken, 0, 1, 5] = np.inf
    store(page_view(kept["kv"], I12, sizes.pool), np.array([9]), np.array([3]), *rows)
    pages = np.tile(np.arange(SLOT_PAGES, dtype=np.int32), (SLOTS, 1))
    query = np.zeros(1, QUERY_TOKEN)
    query["position"] = 400
    inputs = {
        "q": rng.standard_normal((1, 256)).astype(np.float32),
        "page_table": pages,
        "query": words_of(query),
    }
    run_step(graph, (key, key), inputs, kept, {}, folder, parts=PARTS)
    got = kept["y"].reshape(4, 64)
    assert np.isfinite(got[:2]).all()
    assert np.isnan(got[2:]).all()


def test_a_soft_cap_is_left_to_the_plain_kernels() -> None:
    """Nothing stands in for what the tuned kernel does not do."""
    for soft_cap, plain in ((0.0, []), (30.0, [0, 1])):
        step = lower_graph(attention(Heads(4, 1, 128), soft_cap), ShapeKey(1, 0), PARTS, "cuda")
        assert plain_ops(plan_launches(step.ops, DEVICE)) == plain
