"""The parts of rule R6: rows as integers, exp2, and the merge of partial softmax sums.

Every line rounds at most once; multiplying by a power of two is exact wherever the rule does it.
Arrays may have any leading axes, so that a tier can compute many rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract import arithmetic
from contract.arrays import Floats, Ints
from contract.lazy_dataclass import dataclass

LOG2_E = np.uint32(0x3FB8AA3B).view(np.float32)
EXP2_POLYNOMIAL = tuple(
    np.uint32(bits).view(np.float32) for bits in (0x3D61FBB0, 0x3E786F0D, 0x3F31798D, 0x3F7FFB49)
)
"""Coefficients of 2^f on [-1/2, 1/2], highest power first; the relative error is 7.5e-5."""
EXP2_MIN = np.float32(arithmetic.ATTENTION_EXP2_MIN)
ROW_LIMIT = np.float32(2.0**arithmetic.ROW_EXPONENT_LIMIT)
MAXIMUM_LIMIT = np.float32(2.0**arithmetic.TILE_MAXIMUM_BITS)
OUTPUT_LIMIT = np.float32(2.0**-arithmetic.OUTPUT_BITS)
OUTPUT_SCALE = np.float32(2.0**-23)
"""2^-23 removes the 10 bits of a value row and the 13 bits of a weight."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [..., n] as integers: ``m`` int32 [..., n] and ``exponent`` int32 [...].

    With B bits, a row stands for m 2^(exponent - B). A broken row has the exponent BROKEN_ROW and
    integers of 0."""

    m: Ints
    exponent: Ints

    def __getitem__(self, at: Any) -> Rows:
        """The rows at an index of the leading axes."""
        return Rows(self.m[at], self.exponent[at])

    @property
    def broken(self) -> NDArray[np.bool_]:
        """The rows that held a NaN, an infinity or a magnitude of 2^40 or more."""
        return np.equal(self.exponent, arithmetic.BROKEN_ROW)


@dataclass(frozen=True, slots=True)
class Partial:
    """Unnormalized softmax over some positions: maximum ``top`` U [...], sum of weights ``total`` l
    [...], weighted sum of values ``output`` o [..., n]."""

    top: Floats
    total: Floats
    output: Floats


def query_bits(head_dim: int) -> int:
    """The bits B of a query row: 13 up to 64 elements, 12 up to 128, 11 up to 256, 10 up to 512."""
    return min(arithmetic.QUERY_BITS, arithmetic.QUERY_PRODUCT_BITS - (head_dim - 1).bit_length())


@np.errstate(invalid="ignore", over="ignore")
def row_integers(x: Floats, bits: int) -> Rows:
    """Make integers of every row of f32 [..., n]: m = rint(x 2^(bits - e)), clamped, where 2^e <=
    max |x| < 2^(e+1)."""
    largest = np.abs(x).max(axis=-1)
    broken, zero = ~(largest < ROW_LIMIT), largest < 1 / ROW_LIMIT
    exponent = np.frexp(largest)[1] - 1
    exponent = np.where(
        zero, -arithmetic.ROW_EXPONENT_LIMIT, np.where(broken, arithmetic.BROKEN_ROW, exponent)
    )
    unit = np.where(broken | zero, np.float32(0.0), power_of_two(bits - exponent))
    limit = np.float32((1 << (bits + 1)) - 1)
    m = x * unit[..., None]
    np.rint(m, out=m)
    np.clip(m, -limit, limit, out=m)
    if broken.any():
        m[broken] = 0
    return Rows(m.astype(np.int32), exponent.astype(np.int32))


def power_of_two(n: Ints | int) -> Floats:
    """2^n in binary32 for -126 <= n <= 127."""
    return np.ldexp(np.float32(1.0), n)


def exp2(d: Floats) -> Floats:
    """2^d, approximately, for -80 <= d < 42."""
    n = np.rint(d)
    f = d - n
    c3, c2, c1, c0 = EXP2_POLYNOMIAL
    y = c3 * f
    y += c2
    y *= f
    y += c1
    y *= f
    y += c0
    return y * ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)


def merge(left: Partial, right: Partial) -> Partial:
    """The softmax sums over the positions of ``left`` and of ``right``, which come later."""
    top = np.maximum(left.top, right.top)
    s, t = _factor(left.top - top), _factor(right.top - top)
    total = left.total * s + right.total * t
    output = left.output * s[..., None] + right.output * t[..., None]
    return Partial(top, total, output)


def _factor(difference: Floats) -> Floats:
    """2^difference for an integer <= 0; +0 below 2^-60."""
    clamped = np.maximum(difference, np.float32(-arithmetic.MERGE_BITS)).astype(np.int32)
    return np.where(difference < -arithmetic.MERGE_BITS, np.float32(0.0), power_of_two(clamped))


def sink_partial(sink: Floats, head_dim: int) -> Partial:
    """The softmax sums of an attention sink f32 [...], which is merged last: a weight without a
    value."""
    x = sink * LOG2_E
    top = np.rint(x)
    part = Partial(top, exp2(x - top), np.zeros((*sink.shape, head_dim), np.float32))
    return broken_where(is_too_large(top), part)


def is_too_large(top: Floats) -> NDArray[np.bool_]:
    """Whether a maximum breaks its query: it is NaN, or its magnitude is 2^20 or more."""
    return ~(np.abs(top) < MAXIMUM_LIMIT)


def broken_where(broken: NDArray[np.bool_], part: Partial) -> Partial:
    """``part`` with NaN outputs where ``broken`` [...] is True; NaN survives every merge."""
    return Partial(
        np.where(broken, np.float32(0.0), part.top),
        np.where(broken, np.float32(1.0), part.total),
        np.where(broken[..., None], np.float32(np.nan), part.output),
    )


def attention_output(sums: Partial) -> Floats:
    """The attention output (o 2^-23) / l; +0 if |o| < 2^-20."""
    y = (sums.output * OUTPUT_SCALE) / sums.total[..., None]
    return np.where(np.abs(sums.output) < OUTPUT_LIMIT, np.float32(0.0), y)


def first_visible(position: int, window: int) -> int:
    """The first position that a query at ``position`` attends to."""
    if window < 0:
        return position // -window * -window
    return max(0, position + 1 - window) if window else 0
