"""Random tensors as stored bytes, from integers only, so that every machine draws the same.

The bits come from Philox4x64-10 keyed by SHA-256 of the seed and the tensor's name: a tensor
does not depend on which others the file holds. Float weights are sums of four 16-bit numbers
(close to normal). Quantized tensors are drawn as blocks: random quants with sane scales, which
needs no quantizer, takes seconds for a billion weights and reaches every code a format has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import (
    BF16,
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
)
from reference.quant import FORMATS
from reference.quant.formats import to_half, write_half
from reference.quant.mxfp4 import EXPONENT_BIAS
from reference.quant.tables import E2M1, IQ4, Table

Bytes = NDArray[np.uint8]

CHUNK_ELEMENTS = 1 << 20
"""Elements drawn at once, in whole rows; part of what GENERATOR_VERSION fixes."""

SUM_OF_FOUR_MEAN = 2 * (2**16 - 1)
SUM_OF_FOUR_DEVIATION = math.sqrt((2.0**32 - 1) / 3)
"""Mean and standard deviation of the sum of four uniform 16-bit integers."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How random bytes of a block become weights of a known spread.

    ``deviation`` is that of the block's values for scale 1; ``scale_at`` the byte offset of the
    binary16 scale (MXFP4: of its exponent); ``minimum_at`` that of the minimum, stored as
    ``minimum`` times the scale so that values centre on 0. A format without a minimum gets scales
    of either sign.
    """

    deviation: float
    scale_at: int
    minimum_at: int | None = None
    minimum: float = 0.0


_LEVELS_2 = math.sqrt((4**2 - 1) / 12)
_LEVELS_3 = math.sqrt((8**2 - 1) / 12)
_LEVELS_4 = math.sqrt((16**2 - 1) / 12)
_LEVELS_5 = math.sqrt((32**2 - 1) / 12)
_LEVELS_6 = math.sqrt((64**2 - 1) / 12)
_LEVELS_8 = math.sqrt((256**2 - 1) / 12)


def _affine_deviation(levels: float, centre: float, sub_top: int = 63) -> float:
    """Of sc*q - centre*mn with sc, mn uniform in 0..sub_top and q of mean ``centre``."""
    mean_square = sub_top * (2 * sub_top + 1) / 6
    sub_levels = math.sqrt(((sub_top + 1) ** 2 - 1) / 12)
    return math.sqrt(levels**2 * mean_square + 2 * (centre * sub_levels) ** 2)


def _root_mean_square(table: Table) -> float:
    return math.sqrt(sum(int(value) ** 2 for value in table.values) / len(table.values))


BLOCK_SHAPES = {
    Q4_0: BlockShape(_LEVELS_4, 0),
    Q4_1: BlockShape(_LEVELS_4, 0, 2, -7.5),
    Q5_0: BlockShape(_LEVELS_5, 0),
    Q5_1: BlockShape(_LEVELS_5, 0, 2, -15.5),
    Q8_0: BlockShape(_LEVELS_8, 0),
    Q4_K: BlockShape(_affine_deviation(_LEVELS_4, 7.5), 0, 2, 7.5),
    Q5_K: BlockShape(_affine_deviation(_LEVELS_5, 15.5), 0, 2, 15.5),
    Q6_K: BlockShape(_LEVELS_6 * _LEVELS_8, 208),
    Q2_K: BlockShape(_affine_deviation(_LEVELS_2, 1.5, 15), 80, 82, 1.5),
    Q3_K: BlockShape(_LEVELS_3 * _LEVELS_6, 108),
    IQ4_NL: BlockShape(_root_mean_square(IQ4), 0),
    IQ4_XS: BlockShape(_root_mean_square(IQ4) * _LEVELS_6, 0),
    MXFP4: BlockShape(_root_mean_square(E2M1), 0),
}


def random_bits(seed: int, name: str) -> np.random.Philox:
    """The bit stream of one tensor."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def normal_like(bits: np.random.Philox, count: int, deviation: float) -> NDArray[np.float32]:
    """f32[count] of mean 0: integers below 2^18 times one rounded factor."""
    lanes = bits.random_raw(count).astype("<u8").view("<u2").reshape(count, 4)
    total = lanes.sum(axis=1, dtype=np.int32) - np.int32(SUM_OF_FOUR_MEAN)
    values: NDArray[np.float32] = total.astype(np.float32)
    values *= np.float32(deviation / SUM_OF_FOUR_DEVIATION)
    return values


def random_bytes(bits: np.random.Philox, count: int) -> Bytes:
    """uint8[count]."""
    return bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def draw_matrix(
    seed: int, name: str, dtype: DType, rows: int, columns: int, deviation: float
) -> Iterator[Bytes]:
    """The stored bytes of a matrix of weights of this deviation, uint8[some rows, row_bytes]."""
    bits = random_bits(seed, name)
    step = max(1, CHUNK_ELEMENTS // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if dtype in (F32, F16, BF16):
            values = normal_like(bits, count * columns, deviation).reshape(count, columns)
            yield FORMATS[dtype].quantize(values)
        else:
            blocks = count * columns // dtype.block_elements
            yield _draw_blocks(bits, dtype, blocks, deviation).reshape(count, -1)


def _draw_blocks(bits: np.random.Philox, dtype: DType, blocks: int, deviation: float) -> Bytes:
    shape = BLOCK_SHAPES[dtype]
    out = random_bytes(bits, blocks * dtype.block_bytes).reshape(blocks, dtype.block_bytes)
    spread = random_bytes(bits, 2 * blocks).reshape(2, blocks)
    if dtype == MXFP4:
        out[:, shape.scale_at] = _exponents(spread[0], deviation / shape.deviation)
        return out
    factor = (spread[0].astype(np.float32) + np.float32(128)) * np.float32(2.0**-8)
    scale = to_half(factor * np.float32(deviation / shape.deviation))
    if shape.minimum_at is None:
        scale = np.where(spread[1] & 1, -scale, scale)
    else:
        minimum = scale.astype(np.float32) * np.float32(shape.minimum)
        write_half(out, shape.minimum_at, to_half(minimum))
    write_half(out, shape.scale_at, scale)
    return out


def _exponents(chance: Bytes, scale: float) -> Bytes:
    """Two neighbouring powers of two, mixed such that their mean square is that of ``scale``."""
    fraction, exponent = math.frexp(scale)
    upper = round(256 * (4 * fraction**2 - 1) / 3)
    return np.where(chance < upper, EXPONENT_BIAS + exponent, EXPONENT_BIAS + exponent - 1).astype(
        np.uint8
    )
