"""MXFP4: blocks of 32 in 17 bytes. e at 0, qs[16] at 1; value = X[nibble] * 2^(e - 128).

X is :data:`reference.quant.tables.E2M1`, twice the number of the standard, so the scale is half of
its 2^(e - 127). Low nibbles are elements 0..15, high nibbles 16..31. The scales of e = 0 and 1
would be subnormal, which rule R0 lets a tier flush: they are 0 on every tier. e = 255 is 2^127
here and NaN in the standard: :func:`reference.quant.find_nonfinite_scale` finds it.
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import MXFP4
from reference.quant.bits import pack_nibbles, unpack_nibbles
from reference.quant.formats import (
    Blocks32,
    Bytes,
    Float32,
    Format,
    flatten,
    in_row_chunks,
    reciprocal,
    split_blocks,
)
from reference.quant.rounding import fold
from reference.quant.tables import E2M1

EXPONENT_BIAS = 128


def power_scale(exponents: Bytes) -> Float32:
    """2^(e - 128), and 0 for e = 0 and 1: the binary32 of exponent field max(e - 1, 0)."""
    field = np.maximum(exponents, 1).astype(np.uint32) - np.uint32(1)
    return (field << np.uint32(23)).view(np.float32)


def unpack(blocks: Bytes) -> Blocks32:
    """q in -12..12 and one scale per block."""
    parts = split_blocks(blocks, MXFP4.block_bytes)
    q = E2M1.values[unpack_nibbles(parts[..., 1:])]
    return Blocks32(flatten(q), power_scale(parts[..., 0]), None)


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(MXFP4)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes].

    The largest magnitude lies in [8, 16) scales, where what is beyond 12 is stored as 12, or in
    [4, 8): whichever has the smaller squared error, the first of equals.
    """
    parts = values.reshape(len(values), -1, 32)
    top = np.frexp(np.abs(parts).max(axis=-1))[1] + (EXPONENT_BIAS - 4)
    e = np.clip([top, top + 1], 0, 254).astype(np.uint8)
    q = [E2M1.nearest_nibble(parts * reciprocal(power_scale(each))[..., None]) for each in e]
    errors = [_squared_error(parts, *stored) for stored in zip(e, q, strict=True)]
    coarse = errors[1] < errors[0]
    out = np.empty((*coarse.shape, MXFP4.block_bytes), np.uint8)
    out[..., 0] = np.where(coarse, e[1], e[0])
    out[..., 1:] = pack_nibbles(np.where(coarse[..., None], q[1], q[0]))
    return out.reshape(len(values), -1)


def _squared_error(parts: Float32, e: Bytes, nibbles: Bytes) -> Float32:
    """Summed over each block, f32[rows, n]."""
    residual = E2M1.values[nibbles] * power_scale(e)[..., None] - parts
    return fold(np.moveaxis(residual * residual, -1, 0))


FORMAT = Format(MXFP4, dequantize, quantize, unpack, scale_offsets=(), exponent_offsets=(0,))
