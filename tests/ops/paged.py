"""A paged KV pool built from plain rows, and attention over those rows in other arithmetics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ops.scalar import F, halves

PAGE = 16
TILE = 64


@dataclass(frozen=True, slots=True)
class Sequence:
    """One slot's history: keys and values [length, kv_heads, head_dim]."""

    keys: NDArray[Any]
    values: NDArray[Any]


def random_sequence(
    seed: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    element: type[np.floating] = np.float32,
) -> Sequence:
    """Gaussian keys and values as stored."""
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, length, kv_heads, head_dim)).astype(element)
    return Sequence(keys, values)


def pool_of(sequences: list[Sequence], seed: int = 0) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Pages in random order with NaN in what is unused, and the page table."""
    slot_pages = max(-(-len(s.keys) // PAGE) for s in sequences)
    count = len(sequences) * slot_pages + 2
    order = np.random.default_rng(seed).permutation(count)
    table = order[: len(sequences) * slot_pages].reshape(len(sequences), slot_pages)
    _, kv_heads, head_dim = sequences[0].keys.shape
    kv = np.full((count, 2, PAGE, kv_heads * head_dim), np.nan, sequences[0].keys.dtype)
    for slot, sequence in enumerate(sequences):
        for position in range(len(sequence.keys)):
            page = kv[table[slot, position // PAGE]]
            page[0, position % PAGE] = sequence.keys[position].ravel()
            page[1, position % PAGE] = sequence.values[position].ravel()
    return kv, table.astype(np.int32)


def softmax_attention(
    q: NDArray[np.float32],
    keys: NDArray[Any],
    values: NDArray[Any],
    scale: float,
    soft_cap: float = 0.0,
) -> NDArray[np.float64]:
    """One query and one head in binary64: softmax(cap(scale q k^T)) v."""
    scores = keys.astype(np.float64) @ q.astype(np.float64) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    weights = np.exp(scores - scores.max())
    return weights @ values.astype(np.float64) / weights.sum()


def scalar_attention(
    q: NDArray[np.float32], keys: NDArray[Any], values: NDArray[Any], first: int, scale: float
) -> list[np.float32]:
    """Rule R6 for one query and one head, one rounding at a time, from position ``first``."""
    merged = None
    for start in range(first - first % TILE, len(keys), TILE):
        positions = range(max(start, first), min(start + TILE, len(keys)))
        scores = [F(_dot(q, keys[p]) * F(scale)) for p in positions]
        maximum = max(scores)
        weights = [scalar_exp(F(s - maximum)) for s in scores]
        placed = [F(0.0)] * (positions[0] - start) + weights
        output = [F(0.0)] * len(q)
        for weight, position in zip(weights, positions, strict=True):
            row = values[position]
            output = [F(o + F(weight * F(v))) for o, v in zip(output, row, strict=True)]
        tile = (maximum, halves(placed), output)
        merged = tile if merged is None else _merge(merged, tile)
    assert merged is not None
    return [F(o / merged[1]) for o in merged[2]]


Tile = tuple[np.float32, np.float32, list[np.float32]]


def _merge(left: Tile, right: Tile) -> Tile:
    maximum = max(left[0], right[0])
    a, b = scalar_exp(F(left[0] - maximum)), scalar_exp(F(right[0] - maximum))
    total = F(F(left[1] * a) + F(right[1] * b))
    output = [F(F(x * a) + F(y * b)) for x, y in zip(left[2], right[2], strict=True)]
    return maximum, total, output


def _dot(q: NDArray[np.float32], key: NDArray[Any]) -> np.float32:
    total = F(0.0)
    for start in range(0, len(q), 16):
        chunk = F(0.0)
        for x, y in zip(q[start : start + 16], key[start : start + 16], strict=True):
            chunk = F(chunk + F(x * F(y)))
        total = F(total + chunk)
    return total


EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2)
EXP_LAST = (1.6666665459e-1, 5.0000001201e-1)


def scalar_exp(x: np.float32) -> np.float32:
    """Rule R2's exp of a number that is not positive."""
    if x < F(-87.0):
        return F(0.0)
    n = F(np.rint(F(x * F(1.44269504088896341))))
    r = F(F(x - F(n * F(0.693359375))) - F(n * F(-2.12194440e-4)))
    y = F(0.0)
    for coefficient in EXP_COEFFICIENTS + EXP_LAST:
        y = F(F(y * r) + F(coefficient))
    return F(F(F(F(y * F(r * r)) + r) + F(1.0)) * F(2.0 ** int(n)))
