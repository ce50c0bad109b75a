"""Q4_0: blocks of 32 in 18 bytes. d binary16 at 0, qs[16] at 2; value = (nibble - 8) * d.

Low nibbles are elements 0..15, high nibbles elements 16..31.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q4_0
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
from reference.quant.rounding import symmetric_blocks


def unpack(blocks: Bytes) -> Blocks32:
    """q in -8..7 and one scale per block."""
    parts = split_blocks(blocks, Q4_0.block_bytes)
    q = unpack_nibbles(parts[..., 2:]).view(np.int8) - np.int8(8)
    return Blocks32(flatten(q), read_half(parts, 0), None)


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q4_0)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; the element of largest magnitude becomes q = -8."""
    scale, q = symmetric_blocks(values.reshape(len(values), -1, 32), 8)
    out = np.empty((*scale.shape, Q4_0.block_bytes), np.uint8)
    write_half(out, 0, scale)
    out[..., 2:] = pack_nibbles(q)
    return out.reshape(len(values), -1)


FORMAT = Format(Q4_0, dequantize, quantize, unpack, scale_offsets=(0,))
