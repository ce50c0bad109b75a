"""IQ4_NL: blocks of 32 in 18 bytes. d binary16 at 0, qs[16] at 2; value = T[nibble] * d.

T is :data:`reference.quant.tables.IQ4`. Low nibbles are elements 0..15, high nibbles 16..31.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import IQ4_NL
from reference.quant.bits import pack_nibbles, unpack_nibbles
from reference.quant.formats import (
    Blocks32,
    Bytes,
    Float32,
    Format,
    flatten,
    in_row_chunks,
    read_half,
    reciprocal,
    split_blocks,
    to_half,
    write_half,
)
from reference.quant.rounding import search_table
from reference.quant.tables import IQ4


def unpack(blocks: Bytes) -> Blocks32:
    """q in -127..113 and one scale per block."""
    parts = split_blocks(blocks, IQ4_NL.block_bytes)
    q = IQ4.values[unpack_nibbles(parts[..., 2:])]
    return Blocks32(flatten(q), read_half(parts, 0), None)


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(IQ4_NL)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes], with a least-squares search in every block."""
    parts = values.reshape(len(values), -1, 32)
    scale = search_table(np.ascontiguousarray(parts.reshape(-1, 32).T), IQ4)
    d = to_half(scale.reshape(parts.shape[:2]))
    scaled = parts * reciprocal(d.astype(np.float32))[..., None]
    out = np.empty((*d.shape, IQ4_NL.block_bytes), np.uint8)
    write_half(out, 0, d)
    out[..., 2:] = pack_nibbles(IQ4.nearest_nibble(scaled))
    return out.reshape(len(values), -1)


FORMAT = Format(IQ4_NL, dequantize, quantize, unpack, scale_offsets=(0,))
