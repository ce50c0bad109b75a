"""IQ4_XS: super-blocks of 256 in 136 bytes.

d binary16 at 0, scales_h u16 at 2, scales_l[4] at 4, qs[128] at 8.
value = d*(ls - 32)*T[nibble], one 6-bit ls per 32 elements: its low four bits are nibble s of
scales_l, the others bits 2s and 2s+1 of scales_h. T is :data:`reference.quant.tables.IQ4`; each 32
elements own 16 bytes of qs in the nibble order of Q4_0.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import IQ4_XS
from reference.quant.bits import pack_nibbles, unpack_nibbles
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
from reference.quant.rounding import search_table, signed_super_blocks
from reference.quant.tables import IQ4

_LOW_SHIFTS = np.array([0, 4], np.uint8)
_HIGH_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def unpack(blocks: Bytes) -> SuperBlocks:
    """q in -127..113 and sub_scale in -32..31 per 32 elements; no minimum."""
    parts = split_blocks(blocks, IQ4_XS.block_bytes)
    shape = parts.shape[:2]
    low = (parts[..., 4:8, None] >> _LOW_SHIFTS & 15).reshape(*shape, 8)
    high = (parts[..., 2:4, None] >> _HIGH_SHIFTS & 3).reshape(*shape, 8)
    q = IQ4.values[unpack_nibbles(parts[..., 8:].reshape(*shape, 8, 16))]
    return SuperBlocks(
        q=flatten(q),
        scale=read_half(parts, 0),
        minimum=None,
        sub_scale=flatten((low | high << 4).astype(np.int16) - np.int16(32)),
        sub_minimum=None,
        sub=32,
    )


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(IQ4_XS)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; the largest sub-block scale becomes ls - 32 = -32."""
    rows = len(values)
    parts = values.reshape(rows, -1, 8, 32)
    scale = search_table(np.ascontiguousarray(parts.reshape(-1, 32).T), IQ4)
    d, sc, scaled = signed_super_blocks(parts, scale.reshape(parts.shape[:3]), 32)
    raised = (sc + np.int8(32)).view(np.uint8)
    out = np.empty((*d.shape, IQ4_XS.block_bytes), np.uint8)
    write_half(out, 0, d)
    high = (raised >> 4).reshape(*d.shape, 2, 4) << _HIGH_SHIFTS
    out[..., 2:4] = np.bitwise_or.reduce(high, axis=-1)
    low = (raised & 15).reshape(*d.shape, 4, 2) << _LOW_SHIFTS
    out[..., 4:8] = np.bitwise_or.reduce(low, axis=-1)
    out[..., 8:] = pack_nibbles(IQ4.nearest_nibble(scaled)).reshape(*d.shape, 128)
    return out.reshape(rows, -1)


FORMAT = Format(IQ4_XS, dequantize, quantize, unpack, scale_offsets=(0,))
