"""Rule R13: integers of rows as codes of a few bits, and a scale for every 32 channels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import (
    CODE_SCALE_MAX,
    CODE_SCALE_PARTS,
    CODE_SCALES,
    CODED_CHANNELS,
    KV_ROW_BITS,
)
from contract.lazy_dataclass import dataclass

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Codes int32 [..., groups, 32] of some bits and scales int32 [..., groups].

    An integer is scale (2 code - (2^bits - 1))."""

    code: Int32
    scale: Int32


def coded(m: Int32, bits: int) -> CodedRows:
    """The codes of integers [..., head_dim], and of six scales the one with the least error.

    G is max |m| / (2^bits - 1) rounded up, at most 255, and no integer may reach 2^11. A group
    takes the first of the scales G - floor(G i / 16), i from 0 to 5, with the least sum of squared
    differences."""
    groups = m.reshape(*m.shape[:-1], m.shape[-1] // CODED_CHANNELS, CODED_CHANNELS)
    top = (1 << bits) - 1
    limit = min((2 << KV_ROW_BITS) // top, CODE_SCALE_MAX)
    largest = np.minimum(-(-np.abs(groups).max(axis=-1) // top), limit)
    best = CodedRows(_nearest(groups, largest, bits), largest)
    least = _squares(groups, best, bits)
    for i in range(1, CODE_SCALES):
        scale = largest - largest * i // CODE_SCALE_PARTS
        found = CodedRows(_nearest(groups, scale, bits), scale)
        squares = _squares(groups, found, bits)
        better = squares < least
        least = np.where(better, squares, least)
        best = CodedRows(
            np.where(better[..., None], found.code, best.code), np.where(better, scale, best.scale)
        )
    return best


def decoded(rows: CodedRows, bits: int) -> Int32:
    """The integers [..., head_dim] that codes stand for."""
    m = (2 * rows.code - ((1 << bits) - 1)) * rows.scale[..., None]
    return m.reshape(*m.shape[:-2], m.shape[-2] * CODED_CHANNELS)


def _nearest(groups: Int32, scale: Int32, bits: int) -> Int32:
    """The codes nearest to integers, between two the lower one; a scale of 0 counts as 1."""
    step = 2 * np.maximum(scale, 1)[..., None]
    code: Int32 = (groups + ((scale << bits) - 1)[..., None]) // step
    code.clip(0, (1 << bits) - 1, out=code)
    return code


def _squares(groups: Int32, rows: CodedRows, bits: int) -> Int32:
    difference = groups - decoded(rows, bits).reshape(groups.shape)
    squares: Int32 = (difference * difference).sum(axis=-1, dtype=np.int32)
    return squares
