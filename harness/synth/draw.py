"""Draws random tensors as stored bytes, with integers only, so every machine draws the same bytes.

The bits come from Philox4x64-10, keyed by SHA-256 of the seed and the tensor's name, so a tensor
does not depend on the file's other tensors. Float weights are sums of four 16-bit numbers (close to
normal). Quantized tensors are drawn as blocks of random quants with moderate scales. That needs no
quantizer, takes seconds for a billion weights and uses every code a format has."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from contract.arrays import Bytes, Floats
from contract.dtypes import DType, StorageClass
from reference.quant import EXPONENT_BIAS, FORMATS, LAYOUTS
from reference.quant.bits import Integers, Packed
from reference.quant.formats import to_half
from reference.quant.layouts import Layout

CHUNK_ELEMENTS = 1 << 20
"""Elements drawn at a time, in whole rows; changing it changes the bytes (GENERATOR_VERSION)."""

SUM_OF_FOUR_MEAN = 2 * (2**16 - 1)
SUM_OF_FOUR_DEVIATION = math.sqrt((2.0**32 - 1) / 3)
"""Standard deviation of the sum of four uniform 16-bit integers."""
PAIRS = np.uint64(0x0000FFFF0000FFFF)


def block_deviation(layout: Layout) -> float:
    """Standard deviation of the values of random blocks of scale 1, about their mean.

    With minima of sub-blocks it is that of sc*q - centre*mn, all uniform, where q has the mean
    ``centre``."""
    elements = _deviation(layout.q)
    if layout.sub_scales is None:
        return elements
    sub_blocks = _deviation(layout.sub_scales)
    if len(layout.floats) == 1:
        return elements * sub_blocks
    top = (1 << layout.sub_scales.bits) - 1
    mean_square = top * (2 * top + 1) / 6
    return math.sqrt(elements**2 * mean_square + 2 * (_centre(layout.q) * sub_blocks) ** 2)


def _deviation(integers: Integers) -> float:
    """The standard deviation of uniform integers; for a table the root mean square of its
    values."""
    if isinstance(integers, Packed) and integers.table is not None:
        values = integers.table.values.tolist()
        return math.sqrt(sum(value**2 for value in values) / len(values))
    return math.sqrt((4**integers.bits - 1) / 12)


def _centre(integers: Integers) -> float:
    return ((1 << integers.bits) - 1) / 2


def random_bits(seed: int, name: str) -> np.random.Philox:
    """The bit stream of one tensor."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def normal_like(bits: np.random.Philox, count: int, deviation: float) -> Floats:
    """f32[count] of mean 0: integers below 2^18 times a factor, rounded once."""
    # The sum of four 16-bit numbers, of which each word has two pairs and then two sums.
    words = bits.random_raw(count)
    pairs = (words & PAIRS) + (words >> np.uint64(16) & PAIRS)
    total = (pairs & np.uint64(2**32 - 1)) + (pairs >> np.uint64(32))
    values: Floats = (total.astype(np.int32) - np.int32(SUM_OF_FOUR_MEAN)).astype(np.float32)
    values *= np.float32(deviation / SUM_OF_FOUR_DEVIATION)
    return values


def random_bytes(bits: np.random.Philox, count: int) -> Bytes:
    """Random bytes, uint8[count]."""
    return bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def draw_matrix(
    seed: int, name: str, dtype: DType, rows: int, columns: int, deviation: float
) -> Iterator[Bytes]:
    """The stored bytes of a matrix of weights with this deviation, uint8[some rows, row_bytes] at a
    time."""
    bits = random_bits(seed, name)
    step = max(1, CHUNK_ELEMENTS // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if dtype.storage is StorageClass.FLOAT:
            values = normal_like(bits, count * columns, deviation).reshape(count, columns)
            yield FORMATS[dtype].quantize(values)
        else:
            blocks = count * columns // dtype.block_elements
            yield _draw_blocks(bits, dtype, blocks, deviation).reshape(count, -1)


def _draw_blocks(bits: np.random.Philox, dtype: DType, blocks: int, deviation: float) -> Bytes:
    layout = LAYOUTS[dtype]
    out = random_bytes(bits, blocks * dtype.block_bytes).reshape(blocks, dtype.block_bytes)
    spread = random_bytes(bits, 2 * blocks).reshape(2, blocks)
    parts, unit = layout.parts(out)[:, 0], deviation / block_deviation(layout)
    if not layout.floats:
        parts["e"] = _exponents(spread[0], unit)
        return out
    factor = (spread[0].astype(np.float32) + np.float32(128)) * np.float32(2.0**-8)
    scale = to_half(factor * np.float32(unit))
    if len(layout.floats) == 1:
        scale = np.where(spread[1] & 1, -scale, scale)
    else:
        # Values are centred on 0; sub-block minima are subtracted.
        centre = -_centre(layout.q) if layout.sub_scales is None else _centre(layout.q)
        parts[layout.floats[1]] = to_half(scale.astype(np.float32) * np.float32(centre))
    parts[layout.floats[0]] = scale
    return out


def _exponents(chance: Bytes, scale: float) -> Bytes:
    """Two adjacent powers of two, mixed so that their mean square is that of ``scale``."""
    fraction, exponent = math.frexp(scale)
    upper = round(256 * (4 * fraction**2 - 1) / 3)
    return np.where(chance < upper, EXPONENT_BIAS + exponent, EXPONENT_BIAS + exponent - 1).astype(
        np.uint8
    )
