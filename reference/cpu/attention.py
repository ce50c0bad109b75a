"""Paged attention of the CPU tier: rule R6 for many queries, heads and tiles at a time.

The bits are those of ``reference.ops.flash_attn_batched``. Both products are sums of integers below
2^31, so a binary64 product of matrices gives them exactly in any order. Queries are taken in blocks
small enough that a block's scores stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import ATTENTION_WEIGHT_BITS, KV_ROW_BITS, KV_SPAN, KV_TILE, PAGE_TOKENS
from contract.arrays import Array, Floats, Ints
from reference.cpu.threads import for_each
from reference.exact.attention_rows import (
    EXP2_MIN,
    LOG2_E,
    Partial,
    Rows,
    attention_output,
    broken_where,
    exp2,
    first_visible,
    is_too_large,
    merge,
    power_of_two,
    query_bits,
    row_integers,
    sink_partial,
)
from reference.exact.coded_rows import rotated, rotated_back
from reference.exact.elementary import tanh
from reference.exact.kv_storage import integers, is_rotated

Float64 = NDArray[np.float64]

BLOCK_QUERIES = 128
"""Query tokens of one block: a block reads its keys and values once for all of them."""
CACHED_ELEMENTS = 1 << 16
"""Elements of one intermediate array, which then stays in a core's cache."""
WIDENED_ELEMENTS = 1 << 18
"""Elements of keys or of values converted to binary64 at a time."""
NO_POSITION = np.float32(-3e38)
"""U of a partial sum without positions; with l and o of +0, merging it changes nothing."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters of one attention node."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class _Cache:
    """One sequence's keys and values as integers, padded to whole tiles.

    ``keys`` and ``values`` are int16 [kv_heads, positions, head_dim]. The others are f32[kv_heads,
    positions]: ``key_unit`` 2^ek, ``value_exponent`` ev, ``value_unit`` 2^(ev + 13). At a position
    with a broken row ev is infinite, which makes U infinite for queries that see it."""

    keys: NDArray[np.int16]
    values: NDArray[np.int16]
    key_unit: Floats
    value_exponent: Floats
    value_unit: Floats

    def of(self, heads: slice, positions: slice = slice(None)) -> _Cache:
        """The part with the given heads and positions."""
        parts = self.keys, self.values, self.key_unit, self.value_exponent, self.value_unit
        return _Cache(*(part[heads, positions] for part in parts))  # type: ignore[arg-type]


def paged_attention(
    q: Floats,
    kv: Array,
    page_table: Ints,
    query: Ints,
    shape: AttentionShape,
    y: Floats,
    sinks: Floats | None = None,
    threads: int | None = None,
) -> None:
    """Fill ``y`` [tokens, heads * head_dim] with the attention of every query token."""
    by_head = (shape.kv_heads, shape.heads // shape.kv_heads)
    queries = q.reshape(len(q), *by_head, shape.head_dim)
    if is_rotated(kv):
        queries = rotated(queries)
    result = y.reshape(queries.shape)
    of_head = None if sinks is None else sinks.reshape(by_head)
    tasks = []
    for rows in _runs_of_one_slot(query):
        positions = query[rows, 2]
        pages = page_table[query[rows.start, 1]]
        cache = _gather(kv, pages, int(positions.max()) + 1, shape, threads)
        heads = 1 if len(positions) > 1 else shape.kv_heads
        for start in range(rows.start, rows.stop, BLOCK_QUERIES):
            block = slice(start, min(start + BLOCK_QUERIES, rows.stop))
            for head in range(0, shape.kv_heads, heads):
                part = slice(head, head + heads)
                own_sinks = None if of_head is None else of_head[part]
                tasks.append(
                    (
                        queries[block, part],
                        cache.of(part),
                        query[block, 2],
                        shape,
                        own_sinks,
                        result[block, part],
                    )
                )
    for_each(lambda task: _attend(*task), tasks, threads)
    if is_rotated(kv):
        result[...] = rotated_back(result)


def _runs_of_one_slot(query: Ints) -> Iterator[slice]:
    boundaries = np.flatnonzero(np.diff(query[:, 1])) + 1
    edges = [0, *boundaries.tolist(), len(query)]
    for start, stop in pairwise(edges):
        if stop > start:
            yield slice(start, stop)


def _gather(
    kv: Array, pages: Ints, length: int, shape: AttentionShape, threads: int | None
) -> _Cache:
    padded = -(-length // KV_TILE) * KV_TILE
    width = 2 * shape.kv_heads * shape.head_dim
    step = max(1, CACHED_ELEMENTS // (width * PAGE_TOKENS)) * PAGE_TOKENS
    of_position = (shape.kv_heads, padded)
    rows = (*of_position, shape.head_dim)
    cache = _Cache(
        np.zeros(rows, np.int16),
        np.zeros(rows, np.int16),
        *(np.zeros(of_position, np.float32) for _ in range(3)),
    )

    def convert(first: int) -> None:
        last = min(first + step, length)
        some = pages[first // PAGE_TOKENS : -(-last // PAGE_TOKENS)]
        found = integers(kv[some])
        at = slice(first, last)
        key, value = (_by_head(found, which, last - first) for which in (0, 1))
        cache.keys[:, at], cache.values[:, at] = key.m, value.m
        broken = key.broken | value.broken
        cache.key_unit[:, at] = power_of_two(key.exponent)
        cache.value_exponent[:, at] = np.where(broken, np.float32(np.inf), value.exponent)
        unit = power_of_two(value.exponent + ATTENTION_WEIGHT_BITS)
        cache.value_unit[:, at] = np.where(broken, np.float32(0.0), unit)

    for_each(convert, range(0, length, step), threads)
    return cache


def _by_head(rows: Rows, which: int, length: int) -> Rows:
    """The keys or the values of whole pages, as [kv_heads, length, ...]."""
    m, exponent = rows.m[:, which], rows.exponent[:, which]
    m = m.reshape(-1, *m.shape[2:])[:length].swapaxes(0, 1)
    return Rows(m, exponent.reshape(-1, exponent.shape[-1])[:length].T)


@np.errstate(all="ignore")
def _attend(
    queries: Floats,
    cache: _Cache,
    positions: Ints,
    shape: AttentionShape,
    sinks: Floats | None,
    out: Floats,
) -> None:
    """Attention of a block of queries [block, kv_heads, group, head_dim] of one sequence.

    The block and the group are one axis of rows inside. A few tiles at a time are computed and
    merged in order; ``sinks`` is [kv_heads, group]."""
    block, kv_heads, group, head_dim = queries.shape
    bits = query_bits(head_dim)
    rows = row_integers(queries.swapaxes(0, 1).reshape(kv_heads, block * group, head_dim), bits)
    m, unit = rows.m.astype(np.float64), power_of_two(rows.exponent - bits - KV_ROW_BITS)
    row_positions = np.repeat(positions, group)
    last = int(positions.max()) // KV_TILE * KV_TILE + KV_TILE
    first = first_visible(int(positions.min()), shape.window)
    step = min(
        CACHED_ELEMENTS // (rows.exponent.size * max(head_dim, KV_TILE)),
        WIDENED_ELEMENTS // (kv_heads * head_dim * KV_TILE),
    )
    step = max(1, step) * KV_TILE
    total = _empty_partial(*rows.m.shape)
    for span in range(first - first % KV_SPAN, last, KV_SPAN):
        folded = _empty_partial(*rows.m.shape)
        end = min(span + KV_SPAN, last)
        for start in range(max(span, first - first % KV_TILE), end, step):
            at = slice(start, min(start + step, end))
            visible = _visible(at, row_positions, shape.window)
            part = cache.of(slice(None), at)
            tiles = _tiles(_scores(m, unit, part, shape), visible, part)
            for tile in range(tiles.top.shape[1]):
                folded = merge(
                    folded, Partial(tiles.top[:, tile], tiles.total[:, tile], tiles.output[:, tile])
                )
        total = merge(total, folded)
    if sinks is not None:
        total = merge(total, sink_partial(np.tile(sinks, (1, block)), head_dim))
    y = attention_output(broken_where(rows.broken, total))
    out[...] = y.reshape(kv_heads, block, group, head_dim).swapaxes(0, 1)


def _empty_partial(kv_heads: int, rows: int, head_dim: int) -> Partial:
    empty = np.zeros((kv_heads, rows), np.float32)
    return Partial(empty + NO_POSITION, empty, np.zeros((kv_heads, rows, head_dim), np.float32))


def _visible(at: slice, row_positions: Ints, window: int) -> NDArray[np.bool_] | None:
    """The positions each row sees, bool [tiles, 64, rows]; None when every row sees all of them."""
    column = np.arange(at.start, at.stop, dtype=np.int32)[:, None]
    visible = column <= row_positions
    if window < 0:
        visible &= column >= row_positions // -window * -window
    elif window:
        visible &= column > row_positions - window
    return None if visible.all() else visible.reshape(-1, KV_TILE, len(row_positions))


def _scores(m: Float64, unit: Floats, cache: _Cache, shape: AttentionShape) -> Floats:
    """x [kv_heads, tiles, 64, rows] of ``m`` [kv_heads, rows, head_dim] in units of ``unit``.

    The longer of the last two axes is innermost in memory: numpy's inner loop follows memory, and
    one query's few heads would make it too short."""
    keys = cache.keys.astype(np.float64)
    kv_heads, rows, _ = m.shape
    if rows < KV_TILE:
        product = (m @ keys.swapaxes(1, 2)).astype(np.float32).swapaxes(1, 2)
    else:
        product = (keys @ m.swapaxes(1, 2)).astype(np.float32)
    scale, cap = np.float32(shape.scale), np.float32(shape.soft_cap)
    product *= ((scale if cap > 0 else scale * LOG2_E) * unit)[:, None]
    product *= cache.key_unit[..., None]
    if cap > 0:
        product = (cap * tanh(product / cap)) * LOG2_E
    return product.reshape(kv_heads, -1, KV_TILE, rows)


def _tiles(x: Floats, visible: NDArray[np.bool_] | None, cache: _Cache) -> Partial:
    """U, l and o of each tile: [kv_heads, tiles, rows] and [kv_heads, tiles, rows, head_dim]."""
    kv_heads, tiles, _, _ = x.shape
    of_tile = (kv_heads, tiles, KV_TILE, 1)
    u = x + cache.value_exponent.reshape(of_tile)
    if visible is not None:
        u = np.where(visible, u, NO_POSITION)
    top = np.rint(u.max(axis=2))
    d = np.subtract(x, top[:, :, None], out=u)
    if visible is not None:
        np.copyto(d, EXP2_MIN, where=~visible)
    p = exp2(np.maximum(d, EXP2_MIN, out=d))
    if visible is not None:
        p *= visible
    w = p * cache.value_unit.reshape(of_tile)
    np.rint(w, out=w)
    values = cache.values.reshape(kv_heads, tiles, KV_TILE, -1).astype(np.float64)
    output = (w.astype(np.float64).swapaxes(2, 3) @ values).astype(np.float32)
    half = KV_TILE // 2
    while half:
        p = p[:, :, :half] + p[:, :, half:]
        half //= 2
    part = Partial(top, p[:, :, 0], output)
    broken = is_too_large(top)
    if visible is not None:
        broken &= visible.any(axis=1)
    return broken_where(broken, part) if broken.any() else part
