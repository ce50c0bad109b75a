"""F32: one little-endian binary32 per element; dequantizing is a view."""

from __future__ import annotations

import numpy as np

from contract.dtypes import F32
from reference.quant.formats import Bytes, Float32, Format


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, 4K] -> f32[rows, K], a view of the bytes."""
    return blocks.view("<f4")


def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, 4K]."""
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


FORMAT = Format(F32, dequantize, quantize, dequantize, scale_offsets=())
