"""Q5_K: super-blocks of 256 in 176 bytes.

d, dmin binary16 at 0 and 2, scales[12] at 4, qh[32] at 16, qs[128] at 48.
value = d*sc*(nibble + 16*bit) - dmin*mn. Nibbles and scales are ordered as in Q4_K; the fifth bit
of element l of sub-block s is bit s of qh[l].
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q5_K
from reference.quant.bits import (
    pack_bits,
    pack_nibbles,
    pack_six_bit_scales,
    unpack_bits,
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
    """q in 0..31, sub_scale and sub_minimum in 0..63 per 32 elements."""
    parts = split_blocks(blocks, Q5_K.block_bytes)
    scales, minima = unpack_six_bit_scales(parts[..., 4:16])
    high = unpack_bits(parts[..., 16:48, None]).swapaxes(-1, -2)
    q = (
        unpack_nibbles(parts[..., 48:].reshape(*parts.shape[:2], 4, 32)).reshape(high.shape)
        | high << 4
    )
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


@in_row_chunks(Q5_K)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes], with a least-squares search in every sub-block."""
    rows = len(values)
    d, dmin, scales, minima, q = affine_super_blocks(values.reshape(rows, -1, 8, 32), 31)
    out = np.empty((*d.shape, Q5_K.block_bytes), np.uint8)
    write_half(out, 0, d)
    write_half(out, 2, dmin)
    out[..., 4:16] = pack_six_bit_scales(scales, minima)
    out[..., 16:48] = pack_bits((q >> 4).swapaxes(-1, -2))[..., 0]
    out[..., 48:] = pack_nibbles((q & 15).reshape(*d.shape, 4, 64)).reshape(*d.shape, 128)
    return out.reshape(rows, -1)


FORMAT = Format(Q5_K, dequantize, quantize, unpack, scale_offsets=(0, 2))
