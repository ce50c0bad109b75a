"""Q4_K: super-blocks of 256 in 144 bytes.

d, dmin binary16 at 0 and 2, scales[12] at 4, qs[128] at 16.
value = d*sc*nibble - dmin*mn, one 6-bit sc and mn per 32 elements. Group g of 64 elements owns
bytes qs[32g .. 32g+31]: their low nibbles are its first 32 elements, their high nibbles the next.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q4_K
from reference.quant.bits import (
    pack_nibbles,
    pack_six_bit_scales,
    unpack_nibbles,
    unpack_six_bit_scales,
)
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
    """q in 0..15, sub_scale and sub_minimum in 0..63 per 32 elements."""
    parts = split_blocks(blocks, Q4_K.block_bytes)
    scales, minima = unpack_six_bit_scales(parts[..., 4:16])
    q = unpack_nibbles(parts[..., 16:].reshape(*parts.shape[:2], 4, 32))
    return SuperBlocks(
        q=flatten(q.view(np.int8)),
        scale=read_half(parts, 0),
        minimum=read_half(parts, 2),
        sub_scale=flatten(scales.astype(np.int16)),
        sub_minimum=flatten(minima.astype(np.int16)),
        sub=32,
    )


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q4_K)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes], with a least-squares search in every sub-block."""
    rows = len(values)
    d, dmin, scales, minima, q = affine_super_blocks(values.reshape(rows, -1, 8, 32), 15)
    out = np.empty((*d.shape, Q4_K.block_bytes), np.uint8)
    write_half(out, 0, d)
    write_half(out, 2, dmin)
    out[..., 4:16] = pack_six_bit_scales(scales, minima)
    out[..., 16:] = pack_nibbles(q.reshape(*d.shape, 4, 64)).reshape(*d.shape, 128)
    return out.reshape(rows, -1)


FORMAT = Format(Q4_K, dequantize, quantize, unpack, scale_offsets=(0, 2))
