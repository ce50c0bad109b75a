"""Q5_1: blocks of 32 in 24 bytes. d, m binary16 at 0 and 2, qh[4] at 4, qs[16] at 8.

value = (nibble | bit << 4) * d + m; the fifth bit of element i is bit i of qh, and nibbles are
ordered as in Q4_0.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q5_1
from reference.quant.bits import pack_bits, pack_nibbles, unpack_bits, unpack_nibbles
from reference.quant.formats import (
    Blocks32,
    Bytes,
    Float32,
    Format,
    flatten,
    in_row_chunks,
    read_half,
    split_blocks,
    write_half,
)
from reference.quant.rounding import affine_blocks


def unpack(blocks: Bytes) -> Blocks32:
    """q in 0..31, one scale and one minimum per block."""
    parts = split_blocks(blocks, Q5_1.block_bytes)
    q = unpack_nibbles(parts[..., 8:]) | unpack_bits(parts[..., 4:8]) << 4
    return Blocks32(flatten(q.view(np.int8)), read_half(parts, 0), read_half(parts, 2))


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q5_1)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; a block's minimum and maximum become q = 0 and 31."""
    scale, minimum, q = affine_blocks(values.reshape(len(values), -1, 32), 31)
    out = np.empty((*scale.shape, Q5_1.block_bytes), np.uint8)
    write_half(out, 0, scale)
    write_half(out, 2, minimum)
    out[..., 4:8] = pack_bits(q >> 4)
    out[..., 8:] = pack_nibbles(q & 15)
    return out.reshape(len(values), -1)


FORMAT = Format(Q5_1, dequantize, quantize, unpack, scale_offsets=(0, 2))
