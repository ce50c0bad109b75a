"""Q2_K: super-blocks of 256 in 84 bytes.

scales[16] at 0, qs[64] at 16, d, dmin binary16 at 80 and 82.
value = d*(b & 15)*q - dmin*(b >> 4), one byte b of scales per 16 elements. Each half of 128 owns 32
bytes of qs: for l = 0..31 the elements l, l+32, l+64, l+96 are the bit pairs 0, 2, 4, 6 of byte l.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q2_K
from reference.quant.bits import pack_pairs, unpack_pairs
from reference.quant.formats import (
    Bytes,
    Float32,
    Format,
    SuperBlocks,
    flatten,
    in_row_chunks,
    read_half,
    split_blocks,
    write_half,
)
from reference.quant.rounding import affine_super_blocks


def unpack(blocks: Bytes) -> SuperBlocks:
    """q in 0..3, sub_scale and sub_minimum in 0..15 per 16 elements."""
    parts = split_blocks(blocks, Q2_K.block_bytes)
    q = unpack_pairs(parts[..., 16:80].reshape(*parts.shape[:2], 2, 32))
    return SuperBlocks(
        q=flatten(q.view(np.int8)),
        scale=read_half(parts, 80),
        minimum=read_half(parts, 82),
        sub_scale=flatten((parts[..., :16] & 15).astype(np.int16)),
        sub_minimum=flatten((parts[..., :16] >> 4).astype(np.int16)),
        sub=16,
    )


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q2_K)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes], with a least-squares search in every sub-block."""
    rows = len(values)
    parts = values.reshape(rows, -1, 16, 16)
    d, dmin, scales, minima, q = affine_super_blocks(parts, top=3, sub_top=15)
    out = np.empty((*d.shape, Q2_K.block_bytes), np.uint8)
    out[..., :16] = scales | minima << 4
    out[..., 16:80] = pack_pairs(q.reshape(*d.shape, 2, 4, 32)).reshape(*d.shape, 64)
    write_half(out, 80, d)
    write_half(out, 82, dmin)
    return out.reshape(rows, -1)


FORMAT = Format(Q2_K, dequantize, quantize, unpack, scale_offsets=(80, 82))
