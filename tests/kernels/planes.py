"""The definition of the layout of ``accel/kernels/formats.k`` in numpy, one step at a time.

The dwords of a row are those of the layout of processors (``tests/opencl/lanes.py``) in another
order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, WeightLayout, tile_bytes
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
    DType,
    StorageClass,
)
from tests.opencl.lanes import ArrangedWeight, Bytes, Dwords, Words, _body_vectors

UPPER_DWORDS = {Q3_K: 1, Q5_0: 1, Q5_1: 1, Q5_K: 1, Q6_K: 2}
"""Of 32 elements; they come before the lower bits."""
SCALE_DWORDS = {Q2_K: 4, Q3_K: 3, Q4_K: 3, Q5_K: 3, Q6_K: 4, IQ4_XS: 1}
"""Of a super-block, before all bits."""
BINARY16_WORD = {Q2_K: 40, Q3_K: 54, Q6_K: 104}
"""The first 16-bit word of a super-block that is a binary16 number, where that is not word 0."""


def planes(dtype: DType, blocks: Bytes, matrices: int = 1) -> ArrangedWeight:
    """Arrange uint8[rows, row_bytes] in tiles: uint8[tiles, tile_bytes]. Float matrices stay as
    they are. Of several ``matrices`` one below the other each begins a tile of its own."""
    rows, row_bytes = blocks.shape
    columns = row_bytes // dtype.block_bytes * dtype.block_elements
    if dtype.storage is StorageClass.FLOAT:
        return ArrangedWeight(blocks, WeightLayout.STORED, rows, columns)
    units = -(-columns // UNIT_COLUMNS)
    each = blocks.reshape(matrices, rows // matrices, row_bytes)
    whole = dtype.row_bytes(units * UNIT_COLUMNS)
    padded = np.pad(each, ((0, 0), (0, -each.shape[1] % TILE_ROWS), (0, whole - row_bytes)))
    stored = padded.reshape(-1, units, UNIT_COLUMNS // dtype.block_elements, dtype.block_bytes)
    out = np.concatenate(_planes_of(dtype, stored), axis=2).reshape(-1, tile_bytes(dtype, columns))
    return ArrangedWeight(out, WeightLayout.PLANES, rows, columns)


def _planes_of(dtype: DType, stored: Bytes) -> list[Bytes]:
    """uint8[rows, units, blocks of a unit, bytes of a block] -> uint8[tiles, units, bytes] each."""
    integers = np.ascontiguousarray(stored[..., 1:] if dtype == MXFP4 else stored)
    words = integers.view("<u2").transpose(3, 0, 1, 2)
    vectors = np.stack(_body_vectors(dtype, words), axis=-1)
    scales = SCALE_DWORDS.get(dtype, 0)
    bits = vectors[..., scales:].reshape(*stored.shape[:2], UNIT_COLUMNS // 32, -1)
    upper = UPPER_DWORDS.get(dtype, 0)
    made = [_by_fours(bits[..., upper:])]
    if upper:
        made.append(_by_fours(bits[..., :upper]))
    return made + _headers(dtype, stored, words, vectors[..., 0, :scales])


def _headers(dtype: DType, stored: Bytes, words: Words, scales: Dwords) -> list[Bytes]:
    """What scales a unit; ``scales`` are uint32[rows, units, dwords] of super-blocks."""
    if dtype == MXFP4:
        return _by_ones(np.ascontiguousarray(stored[..., 0]).view("<u4"))
    if not scales.shape[-1]:
        numbers = words[:2] if dtype in (Q4_1, Q5_1) else words[:1]
        return [_by_fours(np.ascontiguousarray(number).view("<u4")) for number in numbers]
    first = BINARY16_WORD.get(dtype, 0)
    half = words[first, :, :, 0].astype(np.uint32)
    if dtype == Q6_K:
        tail = half.astype("<u2").reshape(-1, TILE_ROWS, half.shape[1]).transpose(0, 2, 1)
        return [_by_fours(scales), np.ascontiguousarray(tail).view(np.uint8)]
    if dtype == Q3_K:
        return [_by_fours(np.concatenate([scales, half[..., None]], axis=-1))]
    both = (half | words[first + 1, :, :, 0].astype(np.uint32) << 16)[..., None]
    if dtype == Q2_K:
        return [_by_fours(scales), *_by_ones(both)]
    if dtype == IQ4_XS:
        return _by_ones(np.concatenate([both, scales], axis=-1))
    return [_by_fours(np.concatenate([both, scales], axis=-1))]


def _by_fours(dwords: NDArray[np.uint32]) -> Bytes:
    """uint32[rows, units, ...] -> planes of 16 bytes a row, uint8[tiles, units, bytes]."""
    rows, units = dwords.shape[:2]
    vectors = dwords.reshape(rows // TILE_ROWS, TILE_ROWS, units, -1, 4).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(vectors).view(np.uint8).reshape(rows // TILE_ROWS, units, -1)


def _by_ones(dwords: NDArray[np.uint32]) -> list[Bytes]:
    """uint32[rows, units, n] -> n planes of 4 bytes a row."""
    _, units, count = dwords.shape
    tiles = dwords.reshape(-1, TILE_ROWS, units, count).transpose(3, 0, 2, 1)
    return list(np.ascontiguousarray(tiles).view(np.uint8))
