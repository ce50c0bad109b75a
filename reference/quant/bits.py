"""Packing of small integers into bytes, and the fields that hold them in a block.

A block is the unit of a quantized format: 32 or 256 weights. ``parts`` [rows, blocks] is a
structured array of blocks, see :mod:`reference.quant.layouts`."""

from __future__ import annotations

import math
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Array, Bytes, Records
from contract.lazy_dataclass import dataclass
from reference.quant.tables import Table

Parts = Records
Int8 = NDArray[np.int8]


@cache
def _shifts(bits: int) -> Bytes:
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


def unpack(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpack integers of ``bits`` bits: uint8[..., n] -> uint8[..., n * 8/bits].

    Each ``run`` bytes hold 8/bits times ``run`` integers: first those in the lowest bits of every
    byte, last those in the highest."""
    if (bits, run) == (1, 1):
        return np.unpackbits(packed, axis=-1, bitorder="little")
    *lead, count = packed.shape
    integers = packed.reshape(*lead, count // run, 1, run) >> _shifts(bits)
    integers &= np.uint8((1 << bits) - 1)
    return integers.reshape(*lead, count * 8 // bits)


def pack(integers: Bytes, bits: int, run: int) -> Bytes:
    """The inverse of :func:`unpack`; higher bits of the integers are ignored."""
    low = integers & np.uint8((1 << bits) - 1)
    if (bits, run) == (1, 1):
        return np.packbits(low, axis=-1, bitorder="little")
    *lead, count = integers.shape
    groups = low.reshape(*lead, count * bits // 8 // run, 8 // bits, run)
    packed = groups[..., 0, :]
    for group in range(1, 8 // bits):
        packed = packed | groups[..., group, :] << np.uint8(bits * group)
    return packed.reshape(*lead, count * bits // 8)


class Integers(Protocol):
    """Reads and writes the small integers that fields of a block hold."""

    @property
    def bits(self) -> int:
        """The bits an integer is stored in."""

    def read(self, parts: Parts) -> Int8:
        """Read the integers, int8[rows, blocks, count]."""

    def write(self, parts: Parts, values: Int8) -> None:
        """Store integers in the form :meth:`read` returns."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Integers stored as one int8 each."""

    field: str
    bits = 8

    def read(self, parts: Parts) -> Int8:
        """A view of the field."""
        values: Int8 = parts[self.field]
        return values

    def write(self, parts: Parts, values: Int8) -> None:
        """Store the bytes."""
        parts[self.field] = values


@dataclass(frozen=True, slots=True)
class Plane:
    """Bits ``shift .. shift + bits - 1`` of integers, in a field packed as :func:`unpack` says."""

    field: str
    bits: int
    run: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """Integers stored as the sum of their planes: value = stored - zero, or table[stored]."""

    planes: tuple[Plane, ...]
    zero: int
    table: Table | None

    def __init__(self, *planes: Plane, zero: int = 0, table: Table | None = None) -> None:
        for name, value in (("planes", planes), ("zero", zero), ("table", table)):
            object.__setattr__(self, name, value)

    @property
    def bits(self) -> int:
        """The bits of all planes together."""
        return sum(plane.bits for plane in self.planes)

    def read(self, parts: Parts) -> Int8:
        """Read the values, C-contiguous."""
        first, *others = self.planes
        stored = unpack(parts[first.field], first.bits, first.run)
        for plane in others:
            stored |= unpack(parts[plane.field], plane.bits, plane.run) << np.uint8(plane.shift)
        if self.table is not None:
            return self.table.values[stored]
        values: Int8 = stored.view(np.int8)
        if self.zero:
            values -= np.int8(self.zero)
        return values

    def write(self, parts: Parts, values: Int8) -> None:
        """Store values that :meth:`read` can return; with a table, the nearest of its values."""
        if self.table is not None:
            stored = self.table.nearest_nibble(values.astype(np.float32))
        else:
            stored = (values + np.int8(self.zero)).view(np.uint8)
        for plane in self.planes:
            parts[plane.field] = pack(stored >> np.uint8(plane.shift), plane.bits, plane.run)


@dataclass(frozen=True, slots=True)
class SixBitPairs:
    """The 8 scales sc, then the 8 minima mn, 0..63, of Q4_K and Q5_K in 12 bytes b.

    For s < 4: sc = b[s] & 63, mn = b[s+4] & 63; for s >= 4: sc = (b[s+4] & 15) | (b[s-4] >> 6) << 4
    and mn = (b[s+4] >> 4) | (b[s] >> 6) << 4."""

    field: str
    bits = 6

    def read(self, parts: Parts) -> Int8:
        """Read the scales, then the minima."""
        b: Bytes = parts[self.field]
        low, high = b[..., :8] & 63, b[..., :8] >> 6 << 4
        last = unpack(b[..., 8:], 4, 4) | high
        pairs = (low[..., :4], last[..., :4], low[..., 4:], last[..., 4:])
        return np.concatenate(pairs, axis=-1).view(np.int8)

    def write(self, parts: Parts, values: Int8) -> None:
        """Store scales and minima."""
        stored = values.view(np.uint8).reshape(*values.shape[:-1], 2, 2, 4)
        first, last = stored[..., 0, :], stored[..., 1, :]
        out = parts[self.field]
        out[..., :8] = flat(first | last >> 4 << 6, 2)
        out[..., 8:] = pack(flat(last, 2), 4, 4)


def flat(array: Array, lead: int) -> Array:
    """Reshape all axes after the first ``lead`` into one, even when they are empty."""
    return array.reshape(*array.shape[:lead], math.prod(array.shape[lead:]))
