"""FLASH_ATTN_BATCHED: causal attention of any query tokens over the paged KV cache (rule R6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import DOT_CHUNK, KV_TILE, PAGE_TOKENS
from reference.exact.elementary import exp, tanh
from reference.exact.kv_storage import loaded
from reference.exact.sums import fold_segment

Float32 = NDArray[np.float32]


def flash_attn_batched(
    *,
    q: Float32,
    kv: Float32 | NDArray[np.float16] | NDArray[np.uint8],
    page_table: NDArray[np.int32],
    query: NDArray[np.int32],
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Float32:
    """softmax(scale q k^T) v over positions (position - window, position] of each token's slot.

    ``q`` is [tokens, heads * head_dim]; head h reads KV head h // (heads / kv_heads). Positions are
    cut at absolute multiples of 64 into tiles, tiles are merged in order. Returns the shape of q.
    """
    queries = q.reshape(len(q), heads, head_dim)
    y = np.empty_like(queries)
    group = heads // kv_heads
    for token, (_, slot, position, _) in enumerate(query):
        first = max(0, position + 1 - window) if window else 0
        keys, values = _gather(kv, page_table[slot], position + 1, kv_heads, head_dim)
        for head in range(heads):
            y[token, head] = _attend(
                queries[token, head],
                keys[:, head // group],
                values[:, head // group],
                first,
                np.float32(scale),
                np.float32(soft_cap),
            )
    return y.reshape(q.shape)


def _gather(
    kv: NDArray[np.generic],
    pages: NDArray[np.int32],
    length: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Float32, Float32]:
    count = -(-length // PAGE_TOKENS)
    rows = loaded(kv[pages[:count]]).transpose(1, 0, 2, 3)
    flat = rows.reshape(2, count * PAGE_TOKENS, kv_heads, head_dim)
    return flat[0, :length], flat[1, :length]


def _attend(
    q: Float32,
    keys: Float32,
    values: Float32,
    first: int,
    scale: np.float32,
    soft_cap: np.float32,
) -> Float32:
    maximum, total, output = None, None, None
    for start in range(first - first % KV_TILE, len(keys), KV_TILE):
        begin, end = max(start, first), min(start + KV_TILE, len(keys))
        tile_maximum, tile_total, tile_output = _tile(
            q, keys[begin:end], values[begin:end], begin - start, scale, soft_cap
        )
        if maximum is None:
            maximum, total, output = tile_maximum, tile_total, tile_output
            continue
        merged = np.maximum(maximum, tile_maximum)
        a, b = exp(maximum - merged), exp(tile_maximum - merged)
        total = total * a + tile_total * b
        output = output * a + tile_output * b
        maximum = merged
    return output / total


def _tile(
    q: Float32,
    keys: Float32,
    values: Float32,
    offset: int,
    scale: np.float32,
    soft_cap: np.float32,
) -> tuple[np.float32, np.float32, Float32]:
    """Maximum, weight sum and weighted values of the unmasked positions of one tile.

    ``offset`` is the first unmasked position's place in the tile: the weight sum is folded over
    the whole tile, where masked positions weigh +0.
    """
    scores = _dot(q, keys) * scale
    if soft_cap > 0:
        scores = soft_cap * tanh(scores / soft_cap)
    maximum = scores.max()
    weights = np.zeros(KV_TILE, np.float32)
    weights[offset : offset + len(scores)] = exp(scores - maximum)
    output = np.zeros(values.shape[-1], np.float32)
    for weight, value in zip(weights[offset : offset + len(scores)], values, strict=True):
        output = output + weight * value
    return maximum, fold_segment(weights), output


def _dot(q: Float32, keys: Float32) -> Float32:
    """q.k: left fold in chunks of 16 rounded products, then left fold of the chunks."""
    products = q * keys
    total = np.zeros(len(keys), np.float32)
    for start in range(0, products.shape[-1], DOT_CHUNK):
        chunk = np.zeros(len(keys), np.float32)
        for column in range(start, min(start + DOT_CHUNK, products.shape[-1])):
            chunk = chunk + products[:, column]
        total = total + chunk
    return total
