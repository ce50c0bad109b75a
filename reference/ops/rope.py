"""ROPE: rotary position embedding from a precomputed table."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints


def rope(
    *, x: Floats, rope_table: Floats, query: Ints, heads: int, head_dim: int, neox: int
) -> Floats:
    """(a, b) -> (a cos - b sin, a sin + b cos) for every pair of a head.

    ``x`` is [tokens, heads * head_dim]; ``rope_table`` is [context, 2, pairs], cosines first. Pair
    m is channels (m, m + pairs) if ``neox``, else (2m, 2m + 1); later channels pass through."""
    y = x.reshape(len(x), heads, head_dim).copy()
    pairs = rope_table.shape[-1]
    if neox:
        first, second = y[..., :pairs], y[..., pairs : 2 * pairs]
    else:
        first, second = y[..., 0 : 2 * pairs : 2], y[..., 1 : 2 * pairs : 2]
    cosine, sine = np.moveaxis(rope_table[query[:, 2]], 1, 0)[:, :, None, :]
    rotated_first = first * cosine - second * sine
    rotated_second = first * sine + second * cosine
    first[...] = rotated_first
    second[...] = rotated_second
    return y.reshape(x.shape)
