"""Q8_0: blocks of 32 in 34 bytes. d binary16 at 0, int8 qs[32] at 2; value = q * d."""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q8_0
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


def unpack(blocks: Bytes) -> Blocks32:
    """q in -128..127 and one scale per block."""
    parts = split_blocks(blocks, Q8_0.block_bytes)
    q = np.ascontiguousarray(parts[..., 2:]).view(np.int8)
    return Blocks32(flatten(q), read_half(parts, 0), None)


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q8_0)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; a block's largest magnitude becomes q = +-127."""
    parts = values.reshape(len(values), -1, 32)
    scale = to_half(np.abs(parts).max(axis=-1) / np.float32(127))
    q = np.rint(parts * reciprocal(scale.astype(np.float32))[..., None])
    out = np.empty((*scale.shape, Q8_0.block_bytes), np.uint8)
    write_half(out, 0, scale)
    out[..., 2:] = np.clip(q, -127, 127).astype(np.int8).view(np.uint8)
    return out.reshape(len(values), -1)


FORMAT = Format(Q8_0, dequantize, quantize, unpack, scale_offsets=(0,))
