"""Rule R5 computed from raw block bytes with Python integers and exact rationals."""

import struct
from fractions import Fraction

import numpy as np

from contract.dtypes import DType
from tests.exact.rounding import round32


def half(block: bytes, offset: int) -> Fraction:
    """The binary16 at an offset."""
    return Fraction(struct.unpack_from("<e", block, offset)[0])


IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def block32(name: str, block: bytes) -> tuple[list[int], Fraction, Fraction | None]:
    """Integers, d and m (None when the format has none) of one 32-element block."""
    if name in ("iq4_nl", "mxfp4"):
        table, body = (IQ4, block[2:]) if name == "iq4_nl" else (E2M1, block[1:])
        q = [table[body[i % 16] >> (4 * (i // 16)) & 15] for i in range(32)]
        if name == "iq4_nl":
            return q, half(block, 0), None
        return q, Fraction(2) ** (block[0] - 128) if block[0] > 1 else Fraction(0), None
    if name == "q8_0":
        return list(struct.unpack_from("<32b", block, 2)), half(block, 0), None
    affine = name.endswith("_1")
    body = block[4:] if affine else block[2:]
    high = 0
    if name.startswith("q5"):
        high, body = int.from_bytes(body[:4], "little"), body[4:]
    q = [(body[i % 16] >> (4 * (i // 16))) & 15 | ((high >> i) & 1) << 4 for i in range(32)]
    if affine:
        return q, half(block, 0), half(block, 2)
    offset = 16 if name == "q5_0" else 8
    return [value - offset for value in q], half(block, 0), None


def super_block(name: str, block: bytes) -> tuple[list[int], list[int], list[int], int]:
    """Integers, sub-block scales, sub-block minima (zeros when there are none), sub-block size."""
    if name == "q6_k":
        q = []
        for element in range(256):
            side, rest = divmod(element, 128)
            quarter, lane = divmod(rest, 32)
            low = block[64 * side + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
            high = block[128 + 32 * side + lane] >> (2 * quarter) & 3
            q.append((low | high << 4) - 32)
        return q, list(struct.unpack_from("<16b", block, 192)), [0] * 16, 16
    if name in ("q2_k", "q3_k"):
        return two_bit_super_block(name, block)
    if name == "iq4_xs":
        high = int.from_bytes(block[2:4], "little")
        low = int.from_bytes(block[4:8], "little")
        scales = [((low >> 4 * s & 15) | (high >> 2 * s & 3) << 4) - 32 for s in range(8)]
        q = []
        for element in range(256):
            s, lane = divmod(element, 32)
            q.append(IQ4[block[8 + 16 * s + lane % 16] >> (4 * (lane // 16)) & 15])
        return q, scales, [0] * 8, 32
    packed = block[4:16]
    scales, minima = [], []
    for s in range(8):
        if s < 4:
            scales.append(packed[s] & 63)
            minima.append(packed[s + 4] & 63)
        else:
            scales.append((packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4)
            minima.append((packed[s + 4] >> 4) | (packed[s] >> 6) << 4)
    nibbles = 16 if name == "q4_k" else 48
    q = []
    for element in range(256):
        s, lane = divmod(element, 32)
        value = block[nibbles + 32 * (s // 2) + lane] >> (4 * (s % 2)) & 15
        if name == "q5_k":
            value |= (block[16 + lane] >> s & 1) << 4
        q.append(value)
    return q, scales, minima, 32


def two_bit_super_block(name: str, block: bytes) -> tuple[list[int], list[int], list[int], int]:
    """Q2_K and Q3_K, as :func:`super_block`."""
    q = []
    for element in range(256):
        side, rest = divmod(element, 128)
        pair, lane = divmod(rest, 32)
        low = block[(16 if name == "q2_k" else 32) + 32 * side + lane] >> (2 * pair) & 3
        if name == "q3_k":
            low -= 0 if block[lane] >> (4 * side + pair) & 1 else 4
        q.append(low)
    if name == "q2_k":
        return q, [b & 15 for b in block[:16]], [b >> 4 for b in block[:16]], 16
    packed, scales = block[96:108], []
    for s in range(16):
        low = (packed[s] if s < 8 else packed[s - 8] >> 4) & 15
        scales.append((low | (packed[8 + s % 4] >> 2 * (s // 4) & 3) << 4) - 32)
    return q, scales, [0] * 16, 16


D_AT = {"q2_k": 80, "q3_k": 108, "q6_k": 208}
"""Offset of the scale d in a super-block, where it is not 0."""
DMIN_AT = {"q2_k": 82, "q4_k": 2, "q5_k": 2}
"""Offset of dmin in super-blocks with a minimum."""


def quantized_activation(values: list[Fraction]) -> tuple[list[int], Fraction]:
    """m and 2^(E-10) of one segment."""
    largest = max(abs(value) for value in values)
    if largest < Fraction(2) ** -64:
        return [0] * len(values), Fraction(0)
    exponent = -64
    while Fraction(2) ** (exponent + 1) <= largest:
        exponent += 1
    scale = Fraction(2) ** (exponent - 10)
    return [max(-2047, min(2047, round(value / scale))) for value in values], scale


def segment_value(dtype: DType, blocks: list[bytes], m: list[int]) -> Fraction:
    """The segment before the activation scale; asserts that every integer fits int32."""
    if dtype.block_elements == 32:
        total = Fraction(0)
        for b, block in enumerate(blocks):
            q, d, minimum = block32(dtype.name, block)
            part = m[32 * b : 32 * b + 32]
            product = sum(x * y for x, y in zip(q, part, strict=True))
            assert abs(product) < 2**24
            term = round32(d * round32(Fraction(product)))
            if minimum is not None:
                term = round32(term + round32(minimum * round32(Fraction(sum(part)))))
            total = round32(total + term)
        return total
    (block,) = blocks
    q, scales, minima, sub = super_block(dtype.name, block)
    j = sum(scales[i // sub] * q[i] * m[i] for i in range(256))
    p = sum(minima[i // sub] * m[i] for i in range(256))
    assert abs(j) < 2**31
    assert abs(p) < 2**31
    value = round32(half(block, D_AT.get(dtype.name, 0)) * round32(Fraction(j)))
    if dtype.name in DMIN_AT:
        value = round32(value - round32(half(block, DMIN_AT[dtype.name]) * round32(Fraction(p))))
    return value


def dot(dtype: DType, row: np.ndarray, x: np.ndarray) -> Fraction:
    """One output: row uint8[row_bytes] times x f32[K], all finite."""
    size = dtype.block_bytes
    blocks = [row.tobytes()[i : i + size] for i in range(0, len(row), size)]
    per_segment = 256 // dtype.block_elements
    values = [Fraction(float(value)) for value in x]
    total = span = Fraction(0)
    for segment, start in enumerate(range(0, len(values), 256)):
        m, scale = quantized_activation(values[start : start + 256])
        stored = blocks[segment * per_segment : (segment + 1) * per_segment]
        value = round32(segment_value(dtype, stored, m) * scale)
        span = value if segment % 4 == 0 else round32(span + value)
        if segment % 4 == 3 or start + 256 >= len(values):
            total = round32(total + span)
    return total
