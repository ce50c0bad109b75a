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

from contract.arithmetic import DOT_CHUNK, KV_TILE, PAGE_TOKENS
from reference.cpu.threads import for_each
from reference.exact.elementary import exp, tanh
from reference.exact.sums import fold_segment

Float32 = NDArray[np.float32]

BLOCK_ELEMENTS = 1 << 17
"""Products held at once by one block: 512 KiB of binary32."""


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
    """One sequence's keys and values, gathered from its pages and padded to whole tiles."""

    keys: Float32
    """[kv_heads, chunks, 16, positions]: transposed so that a fold step is one long row."""
    values: Float32
    """[kv_heads, tiles, 64, head_dim]."""
    finite: bool
    """No value is NaN or infinite, so that a weight of +0 does what masking must."""


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
    if not len(query):
        return
    queries = q.reshape(len(q), shape.kv_heads, -1, shape.head_dim)
    result = out.reshape(queries.shape)
    tasks = []
    for rows in _runs_of_one_slot(query):
        positions = query[rows, 2]
        cache = _gather(kv, page_table[query[rows.start, 1]], int(positions.max()) + 1, shape)
        tasks += [
            (queries[block], cache, query[block, 2], shape, result[block])
            for block in _blocks(rows, positions, shape)
        ]
    for_each(lambda task: _attend(*task), tasks, threads)


def _runs_of_one_slot(query: NDArray[np.int32]) -> Iterator[slice]:
    boundaries = np.flatnonzero(np.diff(query[:, 1])) + 1
    edges = [0, *boundaries.tolist(), len(query)]
    for start, stop in pairwise(edges):
        yield slice(start, stop)


def _blocks(rows: slice, positions: NDArray[np.int32], shape: AttentionShape) -> Iterator[slice]:
    per_query = shape.heads * (int(positions.max()) + KV_TILE) * shape.head_dim // DOT_CHUNK
    size = max(1, BLOCK_ELEMENTS // per_query)
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def _gather(
    kv: NDArray[np.generic], pages: NDArray[np.int32], length: int, shape: AttentionShape
) -> _Cache:
    tiles = -(-length // KV_TILE)
    count = -(-length // PAGE_TOKENS)
    padded = np.zeros((2, tiles * KV_TILE, shape.kv_heads, shape.head_dim), np.float32)
    stored = kv[pages[:count]].transpose(1, 0, 2, 3)
    padded[:, :length] = stored.reshape(2, -1, shape.kv_heads, shape.head_dim)[:, :length]
    chunks = -(-shape.head_dim // DOT_CHUNK)
    keys = np.zeros((shape.kv_heads, chunks * DOT_CHUNK, tiles * KV_TILE), np.float32)
    keys[:, : shape.head_dim] = padded[0].transpose(1, 2, 0)
    values = padded[1].reshape(tiles, KV_TILE, shape.kv_heads, shape.head_dim)
    return _Cache(
        keys.reshape(shape.kv_heads, chunks, DOT_CHUNK, -1),
        np.ascontiguousarray(values.transpose(2, 0, 1, 3)),
        bool(np.isfinite(padded[1]).all()),
    )


def _attend(
    queries: Float32,
    cache: _Cache,
    positions: NDArray[np.int32],
    shape: AttentionShape,
    out: Float32,
) -> None:
    """Attention of a block of queries [block, kv_heads, group, head_dim] of one sequence."""
    with np.errstate(all="ignore"):
        last = int(positions.max())
        first = max(0, int(positions.min()) + 1 - shape.window) if shape.window else 0
        tiles = slice(first // KV_TILE, last // KV_TILE + 1)
        scores = _scores(queries, cache, tiles, shape)
        column = np.arange(tiles.start * KV_TILE, tiles.stop * KV_TILE, dtype=np.int32)
        visible = column <= positions[:, None]
        if shape.window:
            visible &= column > positions[:, None] - shape.window
        _merge_tiles(scores, visible, cache.values[:, tiles], cache.finite, out)


def _scores(queries: Float32, cache: _Cache, tiles: slice, shape: AttentionShape) -> Float32:
    """Scaled scores [block, kv_heads, group, tiles * 64]."""
    keys = cache.keys[..., tiles.start * KV_TILE : tiles.stop * KV_TILE]
    chunks = keys.shape[1]
    padded = queries
    if chunks * DOT_CHUNK != shape.head_dim:
        padded = np.zeros((*queries.shape[:-1], chunks * DOT_CHUNK), np.float32)
        padded[..., : shape.head_dim] = queries
    parts = padded.reshape(*queries.shape[:-1], chunks, DOT_CHUNK, 1)
    total = np.zeros((*queries.shape[:-1], keys.shape[-1]), np.float32)
    folded = np.zeros((*queries.shape[:-1], chunks, keys.shape[-1]), np.float32)
    for columns in _strides(DOT_CHUNK, folded.size):
        products = parts[..., columns, :] * keys[:, None, :, columns]
        for column in range(products.shape[-2]):
            folded += products[..., column, :]
    for chunk in range(chunks):
        total += folded[..., chunk, :]
    total *= np.float32(shape.scale)
    if shape.soft_cap > 0:
        cap = np.float32(shape.soft_cap)
        total = cap * tanh(total / cap)
    return total


def _strides(columns: int, size: int) -> Iterator[slice]:
    """Runs of columns whose products, ``size`` elements a column, fill one block."""
    step = max(1, min(columns, BLOCK_ELEMENTS // size))
    for start in range(0, columns, step):
        yield slice(start, min(start + step, columns))


def _merge_tiles(
    scores: Float32, visible: NDArray[np.bool_], values: Float32, finite: bool, out: Float32
) -> None:
    """Softmax and weighted sum per tile, then the ordered merge; writes ``out``."""
    block, kv_heads, group, positions = scores.shape
    tiles = positions // KV_TILE
    tiled = scores.reshape(block, kv_heads, group, tiles, KV_TILE)
    mask = visible.reshape(block, 1, 1, tiles, KV_TILE)
    tiled = np.where(mask, tiled, np.float32(-np.inf))
    exists = mask.any(axis=-1)
    maximum = np.where(exists, tiled.max(axis=-1), np.float32(0.0))
    weights = np.where(mask, exp(tiled - maximum[..., None]), np.float32(0.0))
    totals = fold_segment(weights)
    outputs = np.zeros((block, kv_heads, group, tiles, values.shape[-1]), np.float32)
    for columns in _strides(KV_TILE, outputs.size):
        products = weights[..., columns, None] * values[:, None, :, columns]
        if not finite:
            np.copyto(products, np.float32(0.0), where=~mask[..., columns, None])
        for column in range(products.shape[-2]):
            outputs += products[..., column, :]
    _merge_in_order(maximum, totals, outputs, exists[:, 0, 0], out)


def _merge_in_order(
    maximum: Float32,
    total: Float32,
    output: Float32,
    exists: NDArray[np.bool_],
    out: Float32,
) -> None:
    """Rule R6's merge, tile by tile; a query's first existing tile is assigned."""
    top, weight, value = maximum[..., 0], total[..., 0], output[..., 0, :]
    started = exists[:, 0]
    for tile in range(1, maximum.shape[-1]):
        here = exists[:, tile]
        if not here.any():
            continue
        tile_top, tile_weight, tile_value = (
            maximum[..., tile],
            total[..., tile],
            output[..., tile, :],
        )
        merged = np.maximum(top, tile_top)
        a, b = exp(top - merged), exp(tile_top - merged)
        both = (started & here)[:, None, None]
        assign = (~started & here)[:, None, None]
        weight = np.where(both, weight * a + tile_weight * b, np.where(assign, tile_weight, weight))
        value = np.where(
            both[..., None],
            value * a[..., None] + tile_value * b[..., None],
            np.where(assign[..., None], tile_value, value),
        )
        top = np.where(both, merged, np.where(assign, tile_top, top))
        started = started | here
    np.divide(value, weight[..., None], out=out)
