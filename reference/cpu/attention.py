"""Paged attention of the CPU tier: rule R6 for many queries, heads and tiles at a time.

The bits are those of ``reference.ops.flash_attn_batched``: the same products, the same folds in
the same order, each numpy call doing one rounding for a whole block. Queries are taken in blocks
small enough that a block's scores stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import KV_TILE, PAGE_TOKENS
from reference.cpu.threads import for_each
from reference.exact.elementary import exp, tanh
from reference.exact.kv_storage import loaded
from reference.exact.sums import fold_segment

Float32 = NDArray[np.float32]

DOT_CHUNK = 16
BLOCK_QUERIES = 128
"""Query tokens of one block: a block reads its keys and values once for all of them."""
CACHED_ELEMENTS = 1 << 16
"""Elements of one intermediate array, so that a fold stays in a core's cache."""


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
    """One sequence's keys and values, gathered from its pages and padded to whole tiles.

    ``keys`` is [kv_heads, tiles, chunks, 16, 64], positions last; ``values`` is
    [kv_heads, tiles, 64, head_dim].
    """

    keys: Float32
    values: Float32


def paged_attention(
    q: Float32,
    kv: NDArray[np.generic],
    page_table: NDArray[np.int32],
    query: NDArray[np.int32],
    shape: AttentionShape,
    out: Float32,
    threads: int | None = None,
) -> None:
    """Fill ``out`` [tokens, heads * head_dim] with the attention of every query token."""
    queries = q.reshape(len(q), shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    result = out.reshape(queries.shape)
    tasks = []
    for rows in _runs_of_one_slot(query):
        positions = query[rows, 2]
        cache = _gather(kv, page_table[query[rows.start, 1]], int(positions.max()) + 1, shape)
        heads = 1 if len(positions) > 1 else shape.kv_heads
        for start in range(rows.start, rows.stop, BLOCK_QUERIES):
            block = slice(start, min(start + BLOCK_QUERIES, rows.stop))
            for head in range(0, shape.kv_heads, heads):
                part = slice(head, head + heads)
                keys_values = _Cache(cache.keys[part], cache.values[part])
                tasks.append(
                    (queries[block, part], keys_values, query[block, 2], shape, result[block, part])
                )
    for_each(lambda task: _attend(*task), tasks, threads)


def _runs_of_one_slot(query: NDArray[np.int32]) -> Iterator[slice]:
    boundaries = np.flatnonzero(np.diff(query[:, 1])) + 1
    edges = [0, *boundaries.tolist(), len(query)]
    for start, stop in pairwise(edges):
        if stop > start:
            yield slice(start, stop)


def _gather(
    kv: NDArray[np.generic], pages: NDArray[np.int32], length: int, shape: AttentionShape
) -> _Cache:
    tiles = -(-length // KV_TILE)
    chunks = -(-shape.head_dim // DOT_CHUNK)
    count = -(-length // PAGE_TOKENS)
    padded = np.zeros((2, tiles * KV_TILE, shape.kv_heads, shape.head_dim), np.float32)
    rows = loaded(kv[pages[:count]]).transpose(1, 0, 2, 3)
    padded[:, :length] = rows.reshape(2, -1, shape.kv_heads, shape.head_dim)[:, :length]
    tiled = padded.reshape(2, tiles, KV_TILE, shape.kv_heads, shape.head_dim)
    keys = np.zeros((shape.kv_heads, tiles, chunks * DOT_CHUNK, KV_TILE), np.float32)
    keys[:, :, : shape.head_dim] = tiled[0].transpose(2, 0, 3, 1)
    return _Cache(
        keys.reshape(shape.kv_heads, tiles, chunks, DOT_CHUNK, KV_TILE),
        np.ascontiguousarray(tiled[1].transpose(2, 0, 1, 3)),
    )


@np.errstate(all="ignore")
def _attend(
    queries: Float32,
    cache: _Cache,
    positions: NDArray[np.int32],
    shape: AttentionShape,
    out: Float32,
) -> None:
    """Attention of a block of queries [block, kv_heads, group, head_dim] of one sequence.

    Inside, the block and the group are one axis of rows. Tiles are computed a few at a time and
    merged in order.
    """
    block, kv_heads, group, head_dim = queries.shape
    rows = np.ascontiguousarray(queries.transpose(1, 3, 0, 2)).reshape(kv_heads, head_dim, -1)
    row_positions = np.repeat(positions, group)
    first = max(0, int(positions.min()) + 1 - shape.window) if shape.window else 0
    step = max(1, CACHED_ELEMENTS // (kv_heads * rows.shape[-1] * max(head_dim, KV_TILE)))
    merged = _Merge(kv_heads, rows.shape[-1], head_dim)
    for start in range(first // KV_TILE, int(positions.max()) // KV_TILE + 1, step):
        tiles = slice(start, min(start + step, int(positions.max()) // KV_TILE + 1))
        column = np.arange(tiles.start * KV_TILE, tiles.stop * KV_TILE, dtype=np.int32)
        visible = column[:, None] <= row_positions
        if shape.window:
            visible &= column[:, None] > row_positions - shape.window
        visible = visible.reshape(-1, KV_TILE, rows.shape[-1])
        scores = _scores(rows, cache.keys[:, tiles], shape)
        merged.add(*_weighted_values(scores, visible, cache.values[:, tiles]), visible.any(axis=1))
    value = merged.value / merged.weight[:, None]
    out[...] = value.reshape(kv_heads, head_dim, block, group).transpose(2, 0, 3, 1)


def _new(shape: tuple[int, ...], fill: float = 0.0) -> Float32:
    """An array whose last axis, rows, is innermost in memory only if it is the longer one.

    numpy's inner loop follows memory: one query's few heads would make it too short.
    """
    *outer, columns, rows = shape
    if rows >= columns:
        return np.full(shape, fill, np.float32)
    return np.full((*outer, rows, columns), fill, np.float32).swapaxes(-1, -2)


def _scores(rows: Float32, keys: Float32, shape: AttentionShape) -> Float32:
    """Scaled scores [kv_heads, tiles, 64, rows] of ``rows`` [kv_heads, head_dim, rows]."""
    kv_heads, tiles, chunks = keys.shape[:3]
    padded = rows
    if chunks * DOT_CHUNK != shape.head_dim:
        padded = np.zeros((kv_heads, chunks * DOT_CHUNK, rows.shape[-1]), np.float32)
        padded[:, : shape.head_dim] = rows
    parts = padded.reshape(kv_heads, 1, chunks, DOT_CHUNK, 1, -1)
    total = _new((kv_heads, tiles, KV_TILE, rows.shape[-1]))
    step = max(1, min(chunks, CACHED_ELEMENTS // total.size))
    for start in range(0, chunks, step):
        some = slice(start, min(start + step, chunks))
        folded = _new((kv_heads, tiles, some.stop - some.start, KV_TILE, rows.shape[-1]))
        product = _new(folded.shape)
        for column in range(DOT_CHUNK):
            np.multiply(keys[:, :, some, column, :, None], parts[:, :, some, column], out=product)
            folded += product
        for chunk in range(folded.shape[2]):
            total += folded[:, :, chunk]
    total *= np.float32(shape.scale)
    if shape.soft_cap > 0:
        cap = np.float32(shape.soft_cap)
        total = cap * tanh(total / cap)
    return total


def _weighted_values(
    scores: Float32, visible: NDArray[np.bool_], values: Float32
) -> tuple[Float32, Float32, Float32]:
    """Per tile the maximum and weight sum [kv_heads, tiles, rows] and the weighted values.

    ``scores`` is [kv_heads, tiles, 64, rows], ``visible`` [tiles, 64, rows], ``values``
    [kv_heads, tiles, 64, head_dim]; the weighted values are [kv_heads, tiles, head_dim, rows].
    """
    scores = np.where(visible, scores, np.float32(-np.inf))
    maximum = np.where(visible.any(axis=1), scores.max(axis=-2), np.float32(0.0))
    weights = np.where(visible, exp(scores - maximum[:, :, None]), np.float32(0.0))
    kv_heads, tiles, _, head_dim = values.shape
    output = _new((kv_heads, tiles, head_dim, scores.shape[-1]))
    last = int(np.flatnonzero(visible.any(axis=(0, 2)))[-1])
    # A masked value is not read: 0 * NaN would carry it into queries that cannot see it.
    masked = None if np.isfinite(values).all() else ~visible[:, :, None]
    step = max(1, min(last + 1, CACHED_ELEMENTS // output.size))
    for start in range(0, last + 1, step):
        some = slice(start, min(start + step, last + 1))
        product = _new((kv_heads, tiles, some.stop - some.start, head_dim, scores.shape[-1]))
        np.multiply(values[:, :, some, :, None], weights[:, :, some, None, :], out=product)
        if masked is not None:
            np.copyto(product, np.float32(0.0), where=masked[:, some])
        for column in range(product.shape[2]):
            output += product[:, :, column]
    return maximum, fold_segment(np.moveaxis(weights, 2, -1)), output


class _Merge:
    """The running result of rule R6's ordered merge of tiles, for rows of several heads."""

    def __init__(self, kv_heads: int, rows: int, head_dim: int) -> None:
        self.started = np.zeros(rows, np.bool_)
        self.top = np.zeros((kv_heads, rows), np.float32)
        self.weight = np.zeros((kv_heads, rows), np.float32)
        self.value = _new((kv_heads, head_dim, rows))

    def add(self, top: Float32, weight: Float32, value: Float32, exists: NDArray[np.bool_]) -> None:
        """Merge tiles [kv_heads, tiles, ...] in order; ``exists`` is [tiles, rows]."""
        for tile in range(top.shape[1]):
            self._add_tile(top[:, tile], weight[:, tile], value[:, tile], exists[tile])

    def _add_tile(
        self, top: Float32, weight: Float32, value: Float32, exists: NDArray[np.bool_]
    ) -> None:
        if not self.started.any():
            self.top, self.weight, self.value = top, weight, value
            self.started = exists.copy()
            return
        merged = np.maximum(self.top, top)
        a, b = exp(self.top - merged), exp(top - merged)
        both, assign = self.started & exists, exists & ~self.started
        combined = self.weight * a + weight * b
        self.weight = np.where(both, combined, np.where(assign, weight, self.weight))
        combined = self.value * a[:, None]
        combined += value * b[:, None]
        if not both.all():
            combined = np.where(both, combined, np.where(assign, value, self.value))
        self.value = combined
        self.top = np.where(both, merged, np.where(assign, top, self.top))
        self.started = self.started | exists
