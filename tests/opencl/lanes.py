"""The definition of the arranged layout: numpy, one step at a time.

``kernels/lanes_layout.h`` says in words what this computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.packets.layouts import LANES, WeightLayout, group_bytes, header_bytes
from contract.dtypes import (
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
    StorageClass,
)

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
Dwords = NDArray[np.uint32]

HEADER_WORDS: dict[DType, tuple[int, ...]] = {Q2_K: (40, 41), Q3_K: (54,), Q6_K: (104,)}
HEADER_WORDS |= dict.fromkeys((Q4_1, Q5_1, Q4_K, Q5_K, IQ4_XS), (0, 1))
"""Which 16-bit words of a block go to the header, where that is not the first alone; MXFP4 has its
first byte there."""
UPPER_BITS = (Q5_0, Q5_1)
"""Formats of 32-blocks with a fifth bit."""


@dataclass(frozen=True, slots=True)
class ArrangedWeight:
    """A weight as the products read it; ``bytes`` is uint8[row groups, bytes of a group]."""

    bytes: Bytes
    layout: WeightLayout
    rows: int
    columns: int


def arranged(dtype: DType, blocks: Bytes, matrices: int = 1) -> ArrangedWeight:
    """Arrange uint8[rows, row_bytes]. The same array where the layout is the stored one.

    Of several ``matrices`` one below the other each begins a row group of its own."""
    rows, row_bytes = blocks.shape
    columns = row_bytes // dtype.block_bytes * dtype.block_elements
    if dtype.storage is StorageClass.FLOAT:
        return ArrangedWeight(blocks, WeightLayout.STORED, rows, columns)
    each = blocks.reshape(matrices, rows // matrices, row_bytes)
    padded = np.pad(each, ((0, 0), (0, -each.shape[1] % LANES), (0, 0)))
    out = np.empty((padded.size // row_bytes // LANES, group_bytes(dtype, columns)), np.uint8)
    _arrange_groups(dtype, padded.reshape(-1, row_bytes), out)
    return ArrangedWeight(out, WeightLayout.LANES, rows, columns)


def _arrange_groups(dtype: DType, blocks: Bytes, out: Bytes) -> None:
    """uint8[16 groups, row_bytes] -> uint8[groups, group_bytes]."""
    groups = len(out)
    stored = blocks.reshape(groups, LANES, -1, dtype.block_bytes)
    units = stored.shape[2]
    exponents = stored[..., :1]
    if dtype == MXFP4:
        stored = np.ascontiguousarray(stored[..., 1:])
    # Word i of every block, uint16[words of a block, groups, blocks of a row, 16].
    planes = np.ascontiguousarray(stored.view("<u2").transpose(3, 0, 2, 1))
    if dtype == MXFP4:
        scales = exponents.transpose(3, 0, 2, 1)
    else:
        scales = planes[list(HEADER_WORDS.get(dtype, (0,)))]
    start = header_bytes(dtype, units * dtype.block_elements)
    header = out[:, :start].view(scales.dtype)
    filled = units * len(scales) * LANES
    header[:, :filled].reshape(groups, units, -1, LANES)[:] = np.moveaxis(scales, 0, 2)
    header[:, filled:] = 0
    body = out[:, start:].view("<u4").reshape(groups, units, -1, LANES)
    for place, vectors in enumerate(_body_vectors(dtype, planes)):
        body[:, :, place] = vectors


def _body_vectors(dtype: DType, planes: Words) -> list[Dwords]:
    """uint16[words, ...] -> the vectors of a block, uint32[...] each."""
    if dtype == Q8_0:
        return list(_fours(planes[1:]) ^ np.uint32(0x80808080))
    if dtype == Q6_K:
        low, high = _nibble_vectors(_fours(planes[:64]).reshape(2, 16, *planes.shape[1:]))
        nibbles = np.concatenate([low, high], axis=1).reshape(8, 4, *planes.shape[1:])
        upper = _pair_vectors(_fours(planes[64:96]))
        return [*_dwords(planes[96:104]), *_by_block(upper, nibbles)]
    if dtype == Q2_K:
        pairs = _pair_vectors(_fours(planes[8:40]))
        return [*_dwords(planes[:8]), *pairs.reshape(16, *planes.shape[1:])]
    if dtype == Q3_K:
        upper, pairs = _plane_vectors(_fours(planes[:16])), _pair_vectors(_fours(planes[16:48]))
        return [*_dwords(planes[48:54]), *_by_block(upper, pairs)]
    if dtype == IQ4_XS:
        low, high = _nibble_vectors(_fours(planes[4:]).reshape(8, 4, *planes.shape[1:]))
        return [*_dwords(planes[2:4]), *_by_block(low, high)]
    if dtype in (Q4_K, Q5_K):
        low, high = _nibble_vectors(_fours(planes[-64:]).reshape(4, 8, *planes.shape[1:]))
        nibbles = np.stack([low, high], axis=1).reshape(8, 4, *planes.shape[1:])
        scales = [*_dwords(planes[2:8])]
        if dtype == Q4_K:
            return [*scales, *nibbles.reshape(32, *planes.shape[1:])]
        return [*scales, *_by_block(_plane_vectors(_fours(planes[8:24])), nibbles)]
    low, high = _nibble_vectors(_fours(planes[-8:])[None])
    fifth = [_scattered(planes[-10:-8])] if dtype in UPPER_BITS else []
    return [*fifth, *low[0], *high[0]]


def _by_block(first: Dwords, second: Dwords) -> list[Dwords]:
    """The vectors of each 32 elements: the first [8, n, ...], then the second [8, m, ...]."""
    both = np.concatenate([first, second], axis=1)
    return list(both.reshape(-1, *second.shape[2:]))


def _dwords(words: Words) -> Dwords:
    """uint16[2n, ...] -> uint32[n, ...]."""
    return np.asarray(words[0::2] | words[1::2].astype(np.uint32) << 16, np.uint32)


def _fours(words: Words) -> Dwords:
    """uint16[2n, ...] -> uint32[n, ...] with the four bytes of each in the order 0 2 1 3."""
    even, odd = words[0::2], words[1::2]
    upper = (even >> 8 | odd & 0xFF00).astype(np.uint32)
    return np.asarray((even & 0xFF | odd << 8) | upper << 16, np.uint32)


def _nibble_vectors(fours: Dwords) -> tuple[Dwords, Dwords]:
    """uint32[parts, 2n, ...] -> of the low and of the high nibbles, uint32[parts, n, ...]."""
    even, odd = fours[:, 0::2], fours[:, 1::2]
    mask = np.uint32(0x0F0F0F0F)
    low, high = even & mask | (odd & mask) << 4, even >> 4 & mask | odd & ~mask
    return np.asarray(low, np.uint32), np.asarray(high, np.uint32)


def _pair_vectors(fours: Dwords) -> Dwords:
    """Pairs of bits of Q2_K, Q3_K and Q6_K: uint32[16, ...] -> uint32[8, 2, ...].

    Bits 2j and 2j + 1 of fours[8h + t] belong to elements 4t to 4t + 3 of block 4h + j."""
    fours = fours.reshape(2, 2, 4, *fours.shape[1:])
    out = np.zeros((2, 4, 2, *fours.shape[3:]), np.uint32)
    for block in range(4):
        for t in range(4):
            out[:, block] |= (fours[:, :, t] >> 2 * block & np.uint32(0x03030303)) << 2 * t
    return out.reshape(8, 2, *fours.shape[3:])


def _plane_vectors(fours: Dwords) -> Dwords:
    """Upper bits of Q3_K and Q5_K: uint32[8, ...] -> uint32[8, 1, ...].

    Bit s of fours[t] belongs to elements 4t to 4t + 3 of block s."""
    out = np.zeros((8, 1, *fours.shape[1:]), np.uint32)
    for block in range(8):
        for t in range(8):
            out[block, 0] |= (fours[t] >> block & np.uint32(0x01010101)) << t
    return out


def _scatter_table() -> Dwords:
    """Where the bits of elements 0 to 7 lie in the vector of upper bits, by their byte."""
    bits = np.arange(256)
    table = np.zeros(256, np.uint32)
    for element in range(8):
        place = 8 * (0, 2, 1, 3)[element % 4] + element // 4
        table |= (bits >> element & 1).astype(np.uint32) << np.uint32(place)
    return table


SCATTERED = _scatter_table()


def _scattered(words: Words) -> Dwords:
    """Q5_0's and Q5_1's upper bits: uint16[2, ...], one bit an element -> uint32[...]."""
    low, high = words
    first = SCATTERED[low & 0xFF] | SCATTERED[low >> 8] << 2
    second = SCATTERED[high & 0xFF] << 4 | SCATTERED[high >> 8] << 6
    return np.asarray(first | second, np.uint32)
