"""FLASH_ATTN_BATCHED: causal attention of any query tokens over the paged KV cache (rule R6)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from contract.arithmetic import ATTENTION_WEIGHT_BITS, KV_ROW_BITS, KV_SPAN, KV_TILE, PAGE_TOKENS
from contract.arrays import Array, Floats, Ints
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
from reference.exact.kv_storage import integers, is_rotated, loaded
from reference.exact.sums import fold_segment

Score = Callable[[Rows, Rows], Floats]


@np.errstate(invalid="ignore", over="ignore")
def flash_attn_batched(
    *,
    q: Floats,
    kv: Array,
    page_table: Ints,
    query: Ints,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Floats | None = None,
) -> Floats:
    """softmax(scale q k^T) v over positions (position - window, position] of each token's slot, or
    those of its chunk of -window positions.

    ``q`` is [tokens, heads * head_dim]; head h reads KV head h // (heads / kv_heads). ``sinks``
    f32[heads] adds to each head's softmax one score that has no value. Positions are cut at
    absolute multiples of 64 into tiles and of 1024 into spans. Where the pages store rotated rows,
    queries are rotated and the result is rotated back (R13). Returns the shape of q."""
    bits = query_bits(head_dim)
    by_head = q.reshape(len(q), heads, head_dim)
    queries = row_integers(rotated(by_head) if is_rotated(kv) else by_head, bits)
    score = partial(_scores, bits=bits, scale=np.float32(scale), soft_cap=np.float32(soft_cap))
    y = np.empty((len(q), heads, head_dim), np.float32)
    for token, (_, slot, position, _) in enumerate(query):
        first = first_visible(int(position), window)
        keys, values = _gather(kv, page_table[slot], position + 1)
        for head in range(heads):
            row, kv_head = queries[token, head], head // (heads // kv_heads)
            sums = _attend(row, keys[:, kv_head], values[:, kv_head], first, score)
            if sinks is not None:
                sums = merge(sums, sink_partial(sinks[head], head_dim))
            y[token, head] = attention_output(sums)
    return (rotated_back(y) if is_rotated(kv) else y).reshape(q.shape)


def _gather(kv: Array, pages: Ints, length: int) -> tuple[Rows, Rows]:
    """The keys and values of the first ``length`` positions as integers: m is [length, kv_heads,
    n]."""
    held = kv[pages[: -(-length // PAGE_TOKENS)]]
    rows = integers(held) if is_rotated(kv) else row_integers(loaded(held), KV_ROW_BITS)
    m = np.moveaxis(rows.m, 1, 0).reshape(2, -1, *rows.m.shape[3:])[:, :length]
    exponent = np.moveaxis(rows.exponent, 1, 0).reshape(2, -1, rows.m.shape[3])[:, :length]
    return Rows(m[0], exponent[0]), Rows(m[1], exponent[1])


def _attend(q: Rows, keys: Rows, values: Rows, first: int, score: Score) -> Partial:
    """Attention of one query head over positions from ``first``: tiles merge into spans, spans into
    one."""
    total = None
    for span in range(first - first % KV_SPAN, len(keys.m), KV_SPAN):
        folded = None
        for start in range(max(span, first - first % KV_TILE), span + KV_SPAN, KV_TILE):
            at = slice(max(start, first), min(start + KV_TILE, len(keys.m)))
            if at.start < at.stop:
                tile = _tile(q, keys[at], values[at], at.start - start, score)
                folded = tile if folded is None else merge(folded, tile)
        assert folded is not None
        total = folded if total is None else merge(total, folded)
    assert total is not None
    return total


def _tile(q: Rows, keys: Rows, values: Rows, offset: int, score: Score) -> Partial:
    """U, l and o of the visible positions of one tile.

    ``offset`` is the index of the first visible position in the tile. l is folded over the whole
    tile, in which masked positions count +0."""
    x = score(q, keys)
    top = np.rint((x + values.exponent.astype(np.float32)).max())
    p = exp2(np.maximum(x - top, EXP2_MIN))
    w = np.rint(p * power_of_two(values.exponent + ATTENTION_WEIGHT_BITS)).astype(np.int32)
    weights = np.zeros(KV_TILE, np.float32)
    weights[offset : offset + len(p)] = p
    output = (w @ values.m).astype(np.float32)
    broken = q.broken | keys.broken.any() | values.broken.any() | is_too_large(top)
    return broken_where(broken, Partial(top, fold_segment(weights), output))


def _scores(q: Rows, keys: Rows, *, bits: int, scale: np.float32, soft_cap: np.float32) -> Floats:
    """The scores x of one query with each key, times log2(e). The integer product is exact in any
    order."""
    product = (keys.m @ q.m).astype(np.float32)
    unit = power_of_two(q.exponent - bits - KV_ROW_BITS)
    of_key = power_of_two(keys.exponent)
    if soft_cap > 0:
        s = (product * (scale * unit)) * of_key
        return (soft_cap * tanh(s / soft_cap)) * LOG2_E
    return (product * ((scale * LOG2_E) * unit)) * of_key
