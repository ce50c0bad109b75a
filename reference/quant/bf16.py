"""BF16: the upper half of a binary32, little-endian; dequantizing is exact."""

from __future__ import annotations

import numpy as np

from contract.dtypes import BF16
from reference.quant.formats import Bytes, Float32, Format


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, 2K] -> f32[rows, K]."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, 2K], to nearest even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    halves = np.where(np.isnan(values), bits >> 16 | 0x40, rounded)
    return halves.astype("<u2").view(np.uint8)


FORMAT = Format(BF16, dequantize, quantize, dequantize, scale_offsets=())
