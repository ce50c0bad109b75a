"""What every storage format offers: dequantize, quantize and unpack, and the planes they share.

Blocks are uint8[rows, row_bytes] exactly as a GGUF file stores them. Value order is row order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import DType

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Quantizer = Callable[[Float32], Bytes]

QUANTIZE_CHUNK_ELEMENTS = 1 << 17
"""Elements a quantizer works on at a time, so that its temporaries stay in the cache."""
QUANTIZE_MAX = np.float32(2.0**30)
"""Beyond every storable magnitude, and small enough that sums of squares do not overflow."""


@dataclass(frozen=True, slots=True)
class Blocks32:
    """A matrix of 32-element blocks: value = q * scale (+ minimum).

    ``q`` int8[rows, K]; ``scale`` f32[rows, K/32]; ``minimum`` f32[rows, K/32] or None.
    """

    q: NDArray[np.int8]
    scale: Float32
    minimum: Float32 | None

    def values(self) -> Float32:
        """f32[rows, K]: one rounded product and, with a minimum, one rounded addition."""
        blocks = self.q.reshape(*self.scale.shape, 32).astype(np.float32) * self.scale[..., None]
        if self.minimum is not None:
            blocks += self.minimum[..., None]
        return blocks.reshape(self.q.shape)


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """A matrix of 256-element super-blocks: value = scale*sub_scale*q (- minimum*sub_minimum).

    ``q`` int8[rows, K]; ``scale``, ``minimum`` f32[rows, K/256]; ``sub_scale``, ``sub_minimum``
    int16[rows, K/sub] with ``sub`` 16 or 32. Formats without a minimum have None in both places.
    """

    q: NDArray[np.int8]
    scale: Float32
    minimum: Float32 | None
    sub_scale: NDArray[np.int16]
    sub_minimum: NDArray[np.int16] | None
    sub: int

    def values(self) -> Float32:
        """f32[rows, K]: (scale*sub_scale)*q - (minimum*sub_minimum), every operation rounded."""
        per_super = 256 // self.sub
        sub_blocks = self.q.reshape(*self.sub_scale.shape, self.sub).astype(np.float32)
        scale = np.repeat(self.scale, per_super, axis=-1) * self.sub_scale.astype(np.float32)
        values = scale[..., None] * sub_blocks
        if self.minimum is not None and self.sub_minimum is not None:
            minimum = np.repeat(self.minimum, per_super, axis=-1)
            values -= (minimum * self.sub_minimum.astype(np.float32))[..., None]
        return values.reshape(self.q.shape)


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format.

    ``dequantize`` uint8[rows, row_bytes] -> f32[rows, K]; ``quantize`` the way back, from
    elementwise correctly rounded operations only, so its bytes are the same on every machine;
    ``unpack`` the stored integers and scales (f32[rows, K] for a float format). ``scale_offsets``
    are the byte offsets of a block's binary16 scales, ``exponent_offsets`` of those stored as a
    power of two in one byte.
    """

    dtype: DType
    dequantize: Callable[[Bytes], Float32]
    quantize: Quantizer
    unpack: Callable[[Bytes], Float32 | Blocks32 | SuperBlocks]
    scale_offsets: tuple[int, ...]
    exponent_offsets: tuple[int, ...] = ()


def split_blocks(blocks: Bytes, block_bytes: int) -> Bytes:
    """View uint8[rows, row_bytes] as uint8[rows, n_blocks, block_bytes]."""
    rows, row_bytes = blocks.shape
    if row_bytes % block_bytes:
        raise ValueError(f"{row_bytes} bytes are not a whole number of {block_bytes}-byte blocks")
    return blocks.reshape(rows, row_bytes // block_bytes, block_bytes)


def flatten(parts: NDArray[Any]) -> NDArray[Any]:
    """[rows, ...] -> [rows, everything else], also for no rows."""
    return parts.reshape(len(parts), math.prod(parts.shape[1:]))


def read_half(blocks: Bytes, offset: int) -> Float32:
    """The binary16 at a byte offset of every block, uint8[..., bytes] -> f32[...], exactly."""
    pair = np.ascontiguousarray(blocks[..., offset : offset + 2])
    return pair.view("<f2")[..., 0].astype(np.float32)


def to_half(values: Float32) -> NDArray[np.float16]:
    """Round to binary16, to nearest even and saturating at +-65504 (rule R1)."""
    return np.clip(values, -65504.0, 65504.0).astype(np.float16)


def write_half(blocks: Bytes, offset: int, values: NDArray[np.float16]) -> None:
    """Store a binary16 at a byte offset of every block."""
    raw = values.astype("<f2")[..., None].view(np.uint8)
    blocks[..., offset : offset + 2] = raw


def reciprocal(values: Float32) -> Float32:
    """1 / values, and 0 where a value is 0 or so small that its reciprocal is not finite."""
    usable = np.abs(values) > np.float32(2.0**-126)
    one = np.float32(1.0)
    return np.where(usable, one / np.where(usable, values, one), np.float32(0.0))


def in_row_chunks(dtype: DType) -> Callable[[Quantizer], Quantizer]:
    """Let a quantizer of a few rows serve a matrix of any height.

    Raises ValueError for rows that are not whole blocks and for NaN or infinity; magnitudes no
    block can store are reduced to ``QUANTIZE_MAX``.
    """

    def decorate(quantize_rows: Quantizer) -> Quantizer:
        @wraps(quantize_rows)
        def quantize(values: Float32) -> Bytes:
            rows, columns = values.shape
            if columns == 0 or columns % dtype.block_elements:
                raise ValueError(f"{columns} columns are not whole {dtype.name} blocks")
            step = max(1, QUANTIZE_CHUNK_ELEMENTS // columns)
            parts = [np.empty((0, dtype.row_bytes(columns)), np.uint8)]
            for first in range(0, rows, step):
                chunk = np.ascontiguousarray(values[first : first + step], np.float32)
                if not np.isfinite(chunk).all():
                    raise ValueError("only finite values can be quantized")
                parts.append(quantize_rows(np.clip(chunk, -QUANTIZE_MAX, QUANTIZE_MAX)))
            return np.concatenate(parts)

        return quantize

    return decorate
