"""Rule R13: the fixed rotation of heads, by signs and a Walsh-Hadamard transform of blocks; then
the integers of rows as codes of a few bits, and a scale for every 32 channels.

A head is cut into blocks of the largest power of two that divides its size. Every sum and the last
product of the rotation are one rounding each, in a fixed order."""

from __future__ import annotations

from functools import cache

import numpy as np

from contract import arithmetic
from contract.arrays import Floats, Ints
from contract.lazy_dataclass import dataclass
from reference.exact.philox import philox

MIN_ROTATED = np.float32(2.0**arithmetic.ROTATION_MIN_EXPONENT)


@cache
def signs(head_dim: int) -> Floats:
    """1 or -1 for every channel of a head: bit i mod 32 of word i / 32 of Philox4x32-10, key 0."""
    counters = range(-(-arithmetic.HEAD_DIM_MAX // 128))
    words = [w for counter in counters for w in philox((0, 0), (counter, 0, 0, 0))]
    bits = [words[i // 32] >> i % 32 & 1 for i in range(head_dim)]
    return np.where(bits, np.float32(-1), np.float32(1))


@cache
def unit(head_dim: int) -> np.float32:
    """1 / sqrt(block), rounded once."""
    return np.float32(1.0 / np.sqrt(np.float64(arithmetic.rotation_block(head_dim))))


def rotated(x: Floats) -> Floats:
    """The rotation of heads f32 [..., head_dim]: channels times their signs, then the transform."""
    return _transformed(_large(x) * signs(x.shape[-1]))


def rotated_back(x: Floats) -> Floats:
    """The inverse of ``rotated``: the transform, then channels times their signs."""
    return _transformed(_large(x)) * signs(x.shape[-1])


def _large(x: Floats) -> Floats:
    """``x`` with +0 for magnitudes below 2^-64, so that no sum is a subnormal number."""
    return np.where(np.abs(x) < MIN_ROTATED, np.float32(0.0), x)


@np.errstate(invalid="ignore", over="ignore")
def _transformed(x: Floats) -> Floats:
    """Pairs of channels (i, i + h) become their sum and difference, for h = 1, 2, 4, ... below the
    size of a block; then each channel is multiplied by ``unit``."""
    size, half = arithmetic.rotation_block(x.shape[-1]), 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        half *= 2
    return x * unit(x.shape[-1])


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Codes int32 [..., groups, 32] of some bits and scales int32 [..., groups].

    An integer is scale (2 code - (2^bits - 1))."""

    code: Ints
    scale: Ints


def coded(m: Ints, bits: int) -> CodedRows:
    """The codes of integers [..., head_dim], and of six scales the one with the least error.

    G is max |m| / (2^bits - 1) rounded up, at most 255, and no integer may reach 2^11. A group
    takes the first of the scales G - floor(G i / 16), i from 0 to 5, with the least sum of squared
    differences."""
    groups = m.reshape(
        *m.shape[:-1], m.shape[-1] // arithmetic.CODED_CHANNELS, arithmetic.CODED_CHANNELS
    )
    top = (1 << bits) - 1
    limit = min((2 << arithmetic.KV_ROW_BITS) // top, arithmetic.CODE_SCALE_MAX)
    largest = np.minimum(-(-np.abs(groups).max(axis=-1) // top), limit)
    best = CodedRows(_nearest(groups, largest, bits), largest)
    least = _squares(groups, best, bits)
    for i in range(1, arithmetic.CODE_SCALES):
        scale = largest - largest * i // arithmetic.CODE_SCALE_PARTS
        found = CodedRows(_nearest(groups, scale, bits), scale)
        squares = _squares(groups, found, bits)
        better = squares < least
        least = np.where(better, squares, least)
        best = CodedRows(
            np.where(better[..., None], found.code, best.code), np.where(better, scale, best.scale)
        )
    return best


def decoded(rows: CodedRows, bits: int) -> Ints:
    """The integers [..., head_dim] that codes stand for."""
    m = (2 * rows.code - ((1 << bits) - 1)) * rows.scale[..., None]
    return m.reshape(*m.shape[:-2], m.shape[-2] * arithmetic.CODED_CHANNELS)


def _nearest(groups: Ints, scale: Ints, bits: int) -> Ints:
    """The codes nearest to integers, between two the lower one; a scale of 0 counts as 1."""
    step = 2 * np.maximum(scale, 1)[..., None]
    code: Ints = (groups + ((scale << bits) - 1)[..., None]) // step
    code.clip(0, (1 << bits) - 1, out=code)
    return code


def _squares(groups: Ints, rows: CodedRows, bits: int) -> Ints:
    difference = groups - decoded(rows, bits).reshape(groups.shape)
    squares: Ints = (difference * difference).sum(axis=-1, dtype=np.int32)
    return squares
