"""Q4_1: blocks of 32 in 20 bytes. d, m binary16 at 0 and 2, qs[16] at 4; value = nibble * d + m.

Low nibbles are elements 0..15, high nibbles elements 16..31.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q4_1
from reference.quant.bits import pack_nibbles, unpack_nibbles
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
    """q in 0..15, one scale and one minimum per block."""
    parts = split_blocks(blocks, Q4_1.block_bytes)
    q = unpack_nibbles(parts[..., 4:]).view(np.int8)
    return Blocks32(flatten(q), read_half(parts, 0), read_half(parts, 2))


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q4_1)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; a block's minimum and maximum become q = 0 and 15."""
    scale, minimum, q = affine_blocks(values.reshape(len(values), -1, 32), 15)
    out = np.empty((*scale.shape, Q4_1.block_bytes), np.uint8)
    write_half(out, 0, scale)
    write_half(out, 2, minimum)
    out[..., 4:] = pack_nibbles(q)
    return out.reshape(len(values), -1)


FORMAT = Format(Q4_1, dequantize, quantize, unpack, scale_offsets=(0, 2))
