"""A paged KV pool built from plain rows, and attention over those rows in other arithmetics."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ops.scalar import F, halves

PAGE = 16
TILE = 64
SPAN = 1024


@dataclass(frozen=True, slots=True)
class Sequence:
    """One slot's history: keys and values [length, kv_heads, head_dim]."""

    keys: NDArray[Any]
    values: NDArray[Any]


def random_sequence(
    seed: int, length: int, kv_heads: int, head_dim: int, element: type[np.floating] = np.float32
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
    kv = np.full((count, 2, PAGE, kv_heads, head_dim), np.nan, sequences[0].keys.dtype)
    for slot, sequence in enumerate(sequences):
        for position in range(len(sequence.keys)):
            page = kv[table[slot, position // PAGE]]
            page[0, position % PAGE] = sequence.keys[position]
            page[1, position % PAGE] = sequence.values[position]
    return kv, table.astype(np.int32)


def softmax_attention(
    q: NDArray[np.float32], keys: NDArray[Any], values: NDArray[Any], scale: float,
    soft_cap: float = 0.0, sink: float = -np.inf,
) -> NDArray[np.float64]:  # fmt: skip
    """One query and one head in binary64: softmax(cap(scale q k^T)) v, with a score of no value."""
    scores = keys.astype(np.float64) @ q.astype(np.float64) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    largest = max(scores.max(), sink)
    weights = np.exp(scores - largest)
    total = weights.sum() + np.exp(sink - largest)
    return weights @ values.astype(np.float64) / total


@dataclass(frozen=True, slots=True)
class Tile:
    """U, l and o of some positions; U is a whole number."""

    top: int
    total: np.float32
    output: list[np.float32]


def scalar_attention(
    q: NDArray[np.float32], keys: NDArray[Any], values: NDArray[Any], first: int, scale: float,
    soft_cap: float = 0.0, sink: float | None = None,
) -> list[np.float32]:  # fmt: skip
    """Rule R6 for one query and one head, one rounding at a time, from position ``first``.

    NaN everywhere where the rule says that the query is broken."""
    spans: list[Tile] = []
    try:
        row = scalar_row(q, min(13, 19 - math.ceil(math.log2(len(q)))))
        for start in range(0, len(keys), SPAN):
            tiles = []
            for tile in range(start, min(start + SPAN, len(keys)), TILE):
                visible = range(max(tile, first), min(tile + TILE, len(keys)))
                if visible:
                    rows = {
                        p: (scalar_row(keys[p], 10), scalar_row(values[p], 10)) for p in visible
                    }
                    tiles.append(_tile(row, rows, tile, F(scale), F(soft_cap)))
            if tiles:
                spans.append(reduce(_merge, tiles))
        total = reduce(_merge, spans)
        if sink is not None:
            x = F(F(sink) * LOG2E)
            top = _whole(x)
            total = _merge(total, Tile(top, scalar_exp2(F(x - F(top))), [F(0.0)] * len(q)))
    except BrokenRowError:
        return [F(np.nan)] * len(q)
    return [
        F(0.0) if abs(o) < F(2.0**-20) else F(F(o * F(2.0**-23)) / total.total)
        for o in total.output
    ]


class BrokenRowError(Exception):
    """What rule R6 calls a broken row or tile."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row as integers: m 2^(e - bits)."""

    m: list[int]
    e: int
    bits: int


def scalar_row(x: Iterable[Any], bits: int) -> Row:
    """The integers of one row, by exact fractions."""
    values = [float(v) for v in x]
    most = max(abs(v) for v in values) if not any(math.isnan(v) for v in values) else math.nan
    if not most < 2.0**40:
        raise BrokenRowError
    if most < 2.0**-40:
        return Row([0] * len(values), -40, bits)
    e = math.frexp(most)[1] - 1
    limit = (1 << (bits + 1)) - 1
    scaled = [round(Fraction(v) * Fraction(2) ** (bits - e)) for v in values]
    return Row([max(-limit, min(limit, m)) for m in scaled], e, bits)


def _whole(u: np.float32) -> int:
    if not abs(u) < 2.0**20:
        raise BrokenRowError
    return int(np.rint(u))


def _tile(
    q: Row, rows: dict[int, tuple[Row, Row]], start: int, scale: np.float32, soft_cap: np.float32
) -> Tile:
    x = {p: _score(q, key, scale, soft_cap) for p, (key, _) in rows.items()}
    top = _whole(max(F(x[p] + F(value.e)) for p, (_, value) in rows.items()))
    weights, output = [F(0.0)] * TILE, [0] * len(q.m)
    for p, (_, value) in rows.items():
        weight = scalar_exp2(max(F(x[p] - F(top)), F(-80.0)))
        weights[p - start] = weight
        w = round(Fraction(float(weight)) * Fraction(2) ** (value.e + 13))
        assert 0 <= w <= MAX_WEIGHT
        output = [o + w * m for o, m in zip(output, value.m, strict=True)]
        assert all(abs(o) < 2**31 for o in output)
    return Tile(top, halves(weights), [F(np.int32(o)) for o in output])


def _score(q: Row, key: Row, scale: np.float32, soft_cap: np.float32) -> np.float32:
    product = sum(a * b for a, b in zip(q.m, key.m, strict=True))
    assert abs(product) < 2**31
    unit = F(2.0 ** (q.e - q.bits - key.bits))
    if soft_cap > 0:
        s = F(F(F(np.int32(product)) * F(scale * unit)) * F(2.0**key.e))
        return F(F(soft_cap * scalar_tanh(F(s / soft_cap))) * LOG2E)
    return F(F(F(np.int32(product)) * F(F(scale * LOG2E) * unit)) * F(2.0**key.e))


def _merge(left: Tile, right: Tile) -> Tile:
    top = max(left.top, right.top)
    s, t = (F(2.0**n) if n >= -60 else F(0.0) for n in (left.top - top, right.top - top))
    total = F(F(left.total * s) + F(right.total * t))
    output = [F(F(a * s) + F(b * t)) for a, b in zip(left.output, right.output, strict=True)]
    return Tile(top, total, output)


LOG2E = np.uint32(0x3FB8AA3B).view(F)
EXP2_COEFFICIENTS = [np.uint32(c).view(F) for c in (0x3D61FBB0, 0x3E786F0D, 0x3F31798D, 0x3F7FFB49)]
MAX_WEIGHT = 12_124


def scalar_exp2(d: np.float32) -> np.float32:
    """Rule R6's exp2."""
    n = int(np.rint(d))
    f = F(d - F(n))
    y = EXP2_COEFFICIENTS[0]
    for coefficient in EXP2_COEFFICIENTS[1:]:
        y = F(F(y * f) + coefficient)
    return F(y * F(2.0**n))


def scalar_tanh(x: np.float32) -> np.float32:
    """Rule R2's tanh."""
    return F(F(1.0) - F(F(2.0) / F(scalar_exp(F(x + x)) + F(1.0))))


EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2)
EXP_LAST = (1.6666665459e-1, 5.0000001201e-1)


def scalar_exp(x: np.float32) -> np.float32:
    """Rule R2's exp."""
    if x < F(-87.0):
        return F(0.0)
    x = min(x, F(87.0))
    n = F(np.rint(F(x * F(1.44269504088896341))))
    r = F(F(x - F(n * F(0.693359375))) - F(n * F(-2.12194440e-4)))
    y = F(0.0)
    for coefficient in EXP_COEFFICIENTS + EXP_LAST:
        y = F(F(y * r) + F(coefficient))
    return F(F(F(F(y * F(r * r)) + r) + F(1.0)) * F(2.0 ** int(n)))
