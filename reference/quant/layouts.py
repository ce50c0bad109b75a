"""The storage formats of GGML: the fields of a block, and how to read and write them.

``LAYOUTS`` lists each format: its fields in file order, the formula of its values, and the bits of
the fields that are the formula's integers. Every binary16 is a scale or a minimum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any

import numpy as np

from contract import dtypes
from contract.arrays import Bytes, Floats
from contract.dtypes import DType
from contract.lazy_dataclass import dataclass
from reference.quant import rounding
from reference.quant.bits import Integers, Packed, Parts, Plane, SixBitPairs, Whole, flat
from reference.quant.formats import Blocks32, SuperBlocks, to_half
from reference.quant.rounding import Encoded, power_scale
from reference.quant.tables import E2M1, IQ4

QUANTIZE_CHUNK_ELEMENTS = 1 << 17
"""Elements quantized at a time, so that the temporaries stay in the cache."""
QUANTIZE_MAX = np.float32(2.0**30)
"""Larger than every storable magnitude, and small enough that sums of squares do not overflow."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A format whose blocks are single floating-point numbers.

    ``unpack`` converts uint8[rows, row_bytes] -> f32[rows, K] exactly; ``quantize`` is the inverse
    and rounds to nearest even."""

    dtype: DType
    unpack: Callable[[Bytes], Floats]
    quantize: Callable[[Floats], Bytes]

    def dequantize(self, blocks: Bytes) -> Floats:
        """uint8[rows, row_bytes] -> f32[rows, K]."""
        return self.unpack(blocks)


@dataclass(frozen=True, slots=True)
class Layout:
    """A format of blocks with scales.

    ``fields`` lists the fields of a block (name, type and, for an array, its length) in file order.
    ``q`` reads the integers of the elements; ``sub_scales`` reads the scales of a super-block's
    sub-blocks, then their minima if the format has them, and is None for blocks of 32. ``encode``
    quantizes f32[rows, n, block elements].
    ``block`` is the structured dtype of the fields."""

    dtype: DType
    fields: tuple[tuple[Any, ...], ...]
    q: Integers
    encode: Callable[[Floats], Encoded]
    sub_scales: Integers | None = None
    block: np.dtype[np.void] = field(init=False)

    def __post_init__(self) -> None:
        # Made once: numpy loses a Ctrl-C that arrives while it makes a dtype.
        object.__setattr__(self, "block", np.dtype(list(self.fields)))

    @property
    def scale(self) -> str:
        """The name of the scale's field: a binary16 d, or the exponent e of a power of two."""
        return self.floats[0] if self.floats else "e"

    @property
    def floats(self) -> tuple[str, ...]:
        """The names of the binary16 fields: the scale and, where there is one, the minimum."""
        return tuple(field[0] for field in self.fields if field[1] == HALF)

    def parts(self, blocks: Bytes) -> Parts:
        """View uint8[rows, row_bytes] as blocks [rows, n]; raises ValueError for a partial
        block."""
        if blocks.shape[1] % self.dtype.block_bytes:
            raise ValueError(
                f"{blocks.shape[1]} bytes are not a whole number of {self.dtype.name} blocks"
            )
        return blocks.view(self.block)

    def unpack(self, blocks: Bytes) -> Blocks32 | SuperBlocks:
        """The stored integers, scales and minima of uint8[rows, row_bytes]."""
        parts = self.parts(blocks)
        q = flat(self.q.read(parts), 1)
        if not self.floats:
            return Blocks32(q, power_scale(parts["e"]), None)
        scale, *minima = (parts[name].astype(np.float32) for name in self.floats)
        minimum = minima[0] if minima else None
        if self.sub_scales is None:
            return Blocks32(q, scale, minimum)
        stored = self.sub_scales.read(parts).astype(np.int16)
        if minimum is None:
            return SuperBlocks(q, scale, None, flat(stored, 1), None, 256 // stored.shape[-1])
        count = stored.shape[-1] // 2
        scales, depths = flat(stored[..., :count], 1), flat(stored[..., count:], 1)
        return SuperBlocks(q, scale, minimum, scales, depths, 256 // count)

    def dequantize(self, blocks: Bytes) -> Floats:
        """uint8[rows, row_bytes] -> f32[rows, K]."""
        return self.unpack(blocks).values()

    def quantize(self, values: Floats) -> Bytes:
        """Quantize f32[rows, K] -> uint8[rows, row_bytes], to the same bytes on every machine.
        Raises ValueError for rows that are not whole blocks and for NaN or infinity; magnitudes no
        block can store are reduced to ``QUANTIZE_MAX``."""
        rows, columns = values.shape
        if columns == 0 or columns % self.dtype.block_elements:
            raise ValueError(f"{columns} columns are not whole {self.dtype.name} blocks")
        out = np.empty((rows, columns // self.dtype.block_elements), self.block)
        step = max(1, QUANTIZE_CHUNK_ELEMENTS // columns)
        for first in range(0, rows, step):
            chunk = np.ascontiguousarray(values[first : first + step], np.float32)
            if not np.isfinite(chunk).all():
                raise ValueError("only finite values can be quantized")
            chunk = np.clip(chunk, -QUANTIZE_MAX, QUANTIZE_MAX)
            self._store(out[first : first + step], chunk)
        return out.view(np.uint8)

    def _store(self, parts: Parts, values: Floats) -> None:
        encoded = self.encode(values.reshape(*parts.shape, self.dtype.block_elements))
        parts[self.scale] = encoded.scale
        if encoded.minimum is not None:
            parts[self.floats[1]] = encoded.minimum
        self.q.write(parts, flat(encoded.q, 2))
        if self.sub_scales is not None and encoded.sub_scales is not None:
            self.sub_scales.write(parts, encoded.sub_scales)


Format = FloatFormat | Layout


def _from_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: Floats) -> Bytes:
    """Round to nearest even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    halves = np.where(np.isnan(values), bits >> 16 | 0x40, rounded)
    return halves.astype("<u2").view(np.uint8)


_FLOATS = (
    FloatFormat(
        dtypes.F32,
        unpack=lambda blocks: blocks.view("<f4"),
        quantize=lambda values: np.ascontiguousarray(values, "<f4").view(np.uint8),
    ),
    # Values beyond binary16 become its largest value, not infinity (rule R1).
    FloatFormat(
        dtypes.F16,
        unpack=lambda blocks: blocks.view("<f2").astype(np.float32),
        quantize=lambda values: np.ascontiguousarray(to_half(values), "<f2").view(np.uint8),
    ),
    # BF16 is the upper half of a binary32.
    FloatFormat(dtypes.BF16, unpack=_from_bf16, quantize=_to_bf16),
)

FLOATS: Mapping[DType, FloatFormat] = {form.dtype: form for form in _FLOATS}
"""Every format of plain floating-point numbers."""

HALF, BYTE, INT8 = "<f2", "u1", "i1"
NIBBLES_32 = Plane("qs", bits=4, run=16)
"""16 bytes hold 32 elements: the first 16 in the low nibbles, the others in the high nibbles."""
FIFTH_BITS = Plane("qh", bits=1, run=1, shift=4)
"""The fifth bit of element i is bit i of the field as a little-endian number."""

_ALL = (
    # Blocks of 32: d*q, and + m where there is a minimum.
    # q = nibble - 8
    Layout(
        dtypes.Q4_0,
        (("d", HALF), ("qs", BYTE, 16)),
        Packed(NIBBLES_32, zero=8),
        partial(rounding.symmetric_blocks, levels=8),
    ),
    # q = nibble
    Layout(
        dtypes.Q4_1,
        (("d", HALF), ("m", HALF), ("qs", BYTE, 16)),
        Packed(NIBBLES_32),
        partial(rounding.affine_blocks, top=15),
    ),
    # q = (nibble | bit << 4) - 16
    Layout(
        dtypes.Q5_0,
        (("d", HALF), ("qh", BYTE, 4), ("qs", BYTE, 16)),
        Packed(NIBBLES_32, FIFTH_BITS, zero=16),
        partial(rounding.symmetric_blocks, levels=16),
    ),
    # q = nibble | bit << 4
    Layout(
        dtypes.Q5_1,
        (("d", HALF), ("m", HALF), ("qh", BYTE, 4), ("qs", BYTE, 16)),
        Packed(NIBBLES_32, FIFTH_BITS),
        partial(rounding.affine_blocks, top=31),
    ),
    # q = the byte
    Layout(dtypes.Q8_0, (("d", HALF), ("qs", INT8, 32)), Whole("qs"), rounding.byte_blocks),
    # q = IQ4[nibble]
    Layout(
        dtypes.IQ4_NL,
        (("d", HALF), ("qs", BYTE, 16)),
        Packed(NIBBLES_32, table=IQ4),
        partial(rounding.table_blocks, table=IQ4),
    ),
    # 2^(e - 128) * E2M1[nibble]. E2M1 is twice the number of the standard, so the scale is half of
    # its 2^(e - 127). The scales of e = 0 and 1 would be subnormal, which rule R0 lets a tier
    # flush: they are 0 on every tier. e = 255 is 2^127 here and NaN in the standard.
    Layout(
        dtypes.MXFP4,
        (("e", BYTE), ("qs", BYTE, 16)),
        Packed(NIBBLES_32, table=E2M1),
        rounding.power_blocks,
    ),
    # Super-blocks of 256: d*sc*q, and - dmin*mn where there is a minimum; one sc and mn for every
    # 16 or 32 elements.
    # q = 2 bits; sc and mn = the low and the high nibble of a byte
    Layout(
        dtypes.Q2_K,
        (("scales", BYTE, 16), ("qs", BYTE, 64), ("d", HALF), ("dmin", HALF)),
        Packed(Plane("qs", bits=2, run=32)),
        partial(rounding.affine_super_blocks, sub_elements=16, top=3, sub_top=15),
        sub_scales=Packed(Plane("scales", bits=4, run=16)),
    ),
    # q = (2 bits | bit << 2) - 4; sc = (nibble | 2 bits << 4) - 32
    Layout(
        dtypes.Q3_K,
        (
            *(("hmask", BYTE, 32), ("qs", BYTE, 64)),
            *(("scales_l", BYTE, 8), ("scales_h", BYTE, 4), ("d", HALF)),
        ),
        Packed(Plane("qs", bits=2, run=32), Plane("hmask", bits=1, run=32, shift=2), zero=4),
        partial(rounding.signed_super_blocks, sub_elements=16, sub_levels=32, levels=4),
        sub_scales=Packed(Plane("scales_l", 4, 8), Plane("scales_h", 2, 4, shift=4), zero=32),
    ),
    # q = nibble; sc and mn of 6 bits
    Layout(
        dtypes.Q4_K,
        (("d", HALF), ("dmin", HALF), ("scales", BYTE, 12), ("qs", BYTE, 128)),
        Packed(Plane("qs", bits=4, run=32)),
        partial(rounding.affine_super_blocks, sub_elements=32, top=15),
        sub_scales=SixBitPairs("scales"),
    ),
    # q = nibble | bit << 4; sc and mn of 6 bits
    Layout(
        dtypes.Q5_K,
        (("d", HALF), ("dmin", HALF), ("scales", BYTE, 12), ("qh", BYTE, 32), ("qs", BYTE, 128)),
        Packed(Plane("qs", bits=4, run=32), Plane("qh", bits=1, run=32, shift=4)),
        partial(rounding.affine_super_blocks, sub_elements=32, top=31),
        sub_scales=SixBitPairs("scales"),
    ),
    # q = (nibble | 2 bits << 4) - 32; sc = the byte
    Layout(
        dtypes.Q6_K,
        (("ql", BYTE, 128), ("qh", BYTE, 64), ("scales", INT8, 16), ("d", HALF)),
        Packed(Plane("ql", bits=4, run=64), Plane("qh", bits=2, run=32, shift=4), zero=32),
        partial(rounding.signed_super_blocks, sub_elements=16, sub_levels=128, levels=32),
        sub_scales=Whole("scales"),
    ),
    # q = IQ4[nibble]; sc = (nibble | 2 bits << 4) - 32
    Layout(
        dtypes.IQ4_XS,
        (("d", HALF), ("scales_h", BYTE, 2), ("scales_l", BYTE, 4), ("qs", BYTE, 128)),
        Packed(NIBBLES_32, table=IQ4),
        partial(rounding.signed_super_blocks, sub_elements=32, sub_levels=32, levels=IQ4),
        sub_scales=Packed(Plane("scales_l", 4, 1), Plane("scales_h", 2, 1, shift=4), zero=32),
    ),
)

LAYOUTS: Mapping[DType, Layout] = {layout.dtype: layout for layout in _ALL}
"""Every format of blocks with scales, by dtype."""
