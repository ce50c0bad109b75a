"""F16: one little-endian binary16 per element; dequantizing is exact."""

from __future__ import annotations

import numpy as np

from contract.dtypes import F16
from reference.quant.formats import Bytes, Float32, Format, to_half


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, 2K] -> f32[rows, K]."""
    return blocks.view("<f2").astype(np.float32)


def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, 2K], to nearest even, saturating at +-65504."""
    return np.ascontiguousarray(to_half(values), "<f2").view(np.uint8)


FORMAT = Format(F16, dequantize, quantize, dequantize, scale_offsets=())
