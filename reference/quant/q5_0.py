"""Q5_0: blocks of 32 in 22 bytes. d binary16 at 0, qh[4] at 2, qs[16] at 6.

value = ((nibble | bit << 4) - 16) * d; the fifth bit of element i is bit i of qh, and nibbles are
ordered as in Q4_0.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q5_0
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
from reference.quant.rounding import symmetric_blocks


def unpack(blocks: Bytes) -> Blocks32:
    """q in -16..15 and one scale per block."""
    parts = split_blocks(blocks, Q5_0.block_bytes)
    q = unpack_nibbles(parts[..., 6:]) | unpack_bits(parts[..., 2:6]) << 4
    q = q.view(np.int8) - np.int8(16)
    return Blocks32(flatten(q), read_half(parts, 0), None)


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q5_0)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; the element of largest magnitude becomes q = -16."""
    scale, q = symmetric_blocks(values.reshape(len(values), -1, 32), 16)
    out = np.empty((*scale.shape, Q5_0.block_bytes), np.uint8)
    write_half(out, 0, scale)
    out[..., 2:6] = pack_bits(q >> 4)
    out[..., 6:] = pack_nibbles(q & 15)
    return out.reshape(len(values), -1)


FORMAT = Format(Q5_0, dequantize, quantize, unpack, scale_offsets=(0,))
