"""The arithmetic functions of the table of semantics, on arrays, and the forms of simulated
registers.

A vector register is uint32[waves, 32], with 1 in either dimension where all values are the same; a
scalar register is uint32[waves] or [1], or as lanes bool[waves, 32]; SCC is bool[waves] or [1].
Float operations are IEEE's with subnormal numbers. The four functions of division follow the ISA
guide's pseudocode for V_DIV_SCALE, V_DIV_FMAS and V_DIV_FIXUP, except where the compiler's sequence
would not be correctly rounded, see the comments. Reciprocals and roots are correctly rounded."""

from collections.abc import Callable
from typing import Any

import numpy as np

from accel.amd.sim.memory_view import GpuFault
from contract.arrays import Array

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64
where, maximum, minimum, trunc, rint, absolute = (
    *(np.where, np.maximum, np.minimum, np.trunc, np.rint, np.absolute),
)
AND, OR, XOR = np.bitwise_and, np.bitwise_or, np.bitwise_xor
ZERO, ONES = u32(0), u32(0xFFFF_FFFF)
I32_LIMITS = -(2.0**31), 2.0**31 - 1
U32_LIMITS = 0.0, 2.0**32 - 1
WAVE = 32

SMALLEST_NORMAL = 2.0**-126
NEAR_OVERFLOW, NEAR_UNDERFLOW, TINY_NUMERATOR = 96, -150, 23
"""Differences of exponents, and an exponent, at which the division is scaled or given up."""


def words(mask: Array) -> Array:
    """Lanes bool[waves, 32] as the 32 bits uint32[waves]."""
    if mask.shape[1] == 1:
        return np.where(mask[:, 0], ONES, ZERO)
    packed = np.packbits(mask, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(u32)[:, 0]


def lanes(bits: Array) -> Array:
    """uint32[waves] as bool[waves, 32]."""
    if len(bits) == 1 and bits[0] in (ZERO, ONES):
        return np.full((1, 1), bits[0] != 0)
    parts = np.ascontiguousarray(bits).view(u8).reshape(-1, 4)
    return np.unpackbits(parts, axis=1, bitorder="little").view(np.bool_)


def as_words(register: Array) -> Array:
    """A scalar register as uint32[waves], whatever its form."""
    return register if register.ndim == 1 else words(register)


def as_lanes(register: Array) -> Array:
    """A scalar register as bool[waves, 32], whatever its form."""
    return register if register.ndim == 2 else lanes(register)


def both(operation: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """A bitwise operation on registers, in a form that either has."""
    if a.ndim != b.ndim:
        a, b = as_lanes(a), as_lanes(b)
    return operation(a, b)


def selected(condition: Array, a: Array, b: Array) -> Array:
    """One of two scalar registers; constants 0 and -1 as lanes."""
    if a.ndim != b.ndim or (len(a) == len(b) == 1 and {int(a[0]), int(b[0])} <= {0, 0xFFFF_FFFF}):
        a, b = as_lanes(a), as_lanes(b)
    if a.ndim == 2:
        condition = condition[:, None]
    return np.where(condition, a, b)


def nonzero(register: Array) -> Any:
    """Whether any bit is set, bool[waves]."""
    return register.any(axis=1) if register.ndim == 2 else register != 0


def reversed_bits(a: Array) -> Array:
    """The bits in reverse order."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        a = (a >> shift & mask) | (a & mask) << shift
    return a >> 16 | a << 16


def leading_zeros(a: Array) -> Array:
    """The leading zero bits of a number that is not 0."""
    # The exponent of binary64, which represents every uint32, is the index of the highest bit.
    return (31 + 1023 - (a.astype(f64).view(u64) >> 52).astype(i32)).astype(u32)


def carried(a: Array, b: Array, c: Array) -> Any:
    """Whether a + b + c reaches 2^32."""
    return a.astype(u64) + b + c > 0xFFFF_FFFF


def borrowed(a: Array, b: Array, c: Array) -> Array:
    """Whether a - b - c is negative."""
    return b.astype(u64) + c > a


def overflowed(a: Array, b: Array, r: Array) -> Array:
    """Whether the signed sum r = a + b has the wrong sign."""
    wrong: Array = (~(a ^ b) & (a ^ r)) >> 31 != 0
    return wrong


def signed24(a: Array) -> Array:
    """The low 24 bits, sign-extended."""
    return a << 8 >> 8


def signed_field(a: Array, first: Array, count: Array) -> Array:
    """``count`` bits from ``first`` on, sign-extended; 0 for none."""
    left = (32 - count.astype(i32)) & 31
    field = (a >> first.astype(i32)) << left >> left
    return np.where(count == 0, i32(0), field)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """V_PERM_B32: each byte of the selector chooses a byte of a:b, a sign, 0 or 255."""
    pair = a.astype(u64) << u64(32) | b
    result: Array = np.zeros((1, 1), u32)
    for byte_index in range(4):
        choice = (selector >> u32(8 * byte_index)) & u32(255)
        byte = (pair >> (choice.astype(u64) % u64(8) * u64(8))).astype(u32) & u32(255)
        sign = (pair >> ((choice.astype(u64) % u64(4)) * u64(16) + u64(15))).astype(u32) & u32(1)
        byte = np.where(choice > 7, sign * u32(255), byte)
        byte = np.where(choice > 11, np.where(choice == 12, ZERO, u32(255)), byte)
        result = result | byte << u32(8 * byte_index)
    return result


def dot4(a: Array, b: Array, c: Array, signs: int) -> Array:
    """V_DOT4_I32_IU8: c + the four products of bytes; bits 0 and 1 of ``signs``: signed."""
    parts = [
        np.ascontiguousarray(x).view(i8 if signs >> n & 1 else u8).astype(i32)
        for n, x in enumerate((a, b))
    ]
    first, second = (part.reshape(part.shape[0], -1, 4) for part in parts)
    products = first * second
    total = products[..., 0] + products[..., 1] + products[..., 2] + products[..., 3]
    result: Array = total.view(u32) + c
    return result


def matrix_product(
    rows: tuple[Array, ...],
    columns: tuple[Array, ...],
    addend: tuple[Array, ...],
    signs: int,
    taking_part: Array | None,
) -> list[Array]:
    """V_WMMA_I32_16X16X16_IU8 of gfx12: the product of two matrices of bytes, plus an optional
    addend. Bits 0 and 1 of ``signs``: signed.

    Lane l has bytes 8 (l div 16) to 8 (l div 16) + 7 of row, or column, l mod 16; of the result,
    and of the addend, register i of lane l is in row i + 8 (l div 16), column l mod 16. Raises
    GpuFault if a lane takes no part, for which the hardware's result is not documented."""
    if taking_part is not None and not taking_part.all():
        raise GpuFault("v_wmma_i32_16x16x16_iu8 with lanes that take no part")
    a, b = (_matrix(part, i8 if signs >> n & 1 else u8) for n, part in enumerate((rows, columns)))
    # Sums stay below 2^24, so that binary32 holds them.
    product = (a @ b.transpose(0, 2, 1)).astype(i32).view(u32)
    halves = product.reshape(-1, 2, 8, 16)
    parts = [halves[:, :, i].reshape(-1, WAVE) for i in range(8)]
    return [x + y for x, y in zip(parts, addend, strict=True)] if addend else parts


def _matrix(registers: tuple[Array, ...], kind: Any) -> Array:
    """float32[waves, 16, 16] of bytes."""
    shape = np.broadcast_shapes(*(x.shape for x in registers))[0], WAVE
    words = np.stack([np.broadcast_to(x, shape) for x in registers], axis=-1)
    parts = np.ascontiguousarray(words).view(kind).reshape(-1, 2, 16, 8)
    matrix: Array = parts.transpose(0, 2, 1, 3).reshape(-1, 16, 16).astype(f32)
    return matrix


def saturated(a: Array, limits: tuple[float, float]) -> Array:
    """Rounded towards 0 and clipped to the limits as binary64; 0 for NaN."""
    return np.where(np.isnan(a), 0.0, np.clip(np.trunc(a.astype(f64)), *limits))


def reciprocal(a: Array) -> Array:
    """1 / a, correctly rounded, since the hardware's last bit is not documented."""
    return (1.0 / a.astype(f64)).astype(f32)


def reciprocal_root(a: Array) -> Array:
    """1 / sqrt(a), correctly rounded."""
    return (1.0 / np.sqrt(a.astype(f64))).astype(f32)


def root(a: Array) -> Array:
    """sqrt(a), correctly rounded."""
    return np.sqrt(a)


def times_power(a: Array, power: Array) -> Array:
    """a * 2^power, rounded once."""
    product: Array = np.ldexp(a.astype(f64), np.clip(power, -400, 400)).astype(f32)
    return product


def larger(a: Array, b: Array) -> Array:
    """maximumNumber of IEEE 754: NaN loses, +0 is larger than -0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def smaller(a: Array, b: Array) -> Array:
    """minimumNumber of IEEE 754: NaN loses, -0 is smaller than +0."""
    return -larger(-a, -b)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once."""
    return _odd_sum(a, b, c).astype(f32)


def _odd_sum(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in binary64, rounded to odd, so that rounding it to binary32 equals rounding once.

    The product of two binary32 is exact; the error of the sum is Knuth's TwoSum."""
    product, addend = a.astype(f64) * b.astype(f64), c.astype(f64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(i64)
    off = ((error > 0) | (error < 0)) & (bits & 1 == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), i64(1), i64(-1))
    return np.where(off, bits + step, bits).view(f64)


def exponent(a: Array) -> Array:
    """The biased exponent of binary32."""
    return (a.view(u32) >> 23 & 255).astype(i32)


def scaled(a: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """V_DIV_SCALE_F32: ``a``, one of the other two, scaled for the division, and whether the
    quotient must be scaled back."""
    n, d = numerator.astype(f64), denominator.astype(f64)
    quotient = np.abs(n / d)
    tiny_quotient = (quotient > 0) & (quotient < SMALLEST_NORMAL)
    # The test is for subnormal in binary32, whatever the format of the computation.
    tiny_reciprocal = np.abs(d) > 1 / SMALLEST_NORMAL
    tiny_denominator = (np.abs(d) < SMALLEST_NORMAL) & (d != 0)
    of_denominator, of_numerator = (a.view(u32) == x.view(u32) for x in (denominator, numerator))
    broken = (n == 0) | (d == 0)
    overflow = exponent(numerator) - exponent(denominator) >= NEAR_OVERFLOW
    both_tiny = tiny_reciprocal & tiny_quotient
    up, down, one = f32(2.0**64), f32(2.0**-64), f32(1)
    factor = np.select(
        [overflow, tiny_denominator, both_tiny, tiny_reciprocal, tiny_quotient],
        [
            np.where(of_denominator, up, one),
            up,
            np.where(of_denominator, up, one),
            down,
            np.where(of_numerator, up, one),
        ],
        np.where(exponent(numerator) <= TINY_NUMERATOR, up, one),
    ).astype(f32)
    back = ~broken & (overflow | ~tiny_denominator & tiny_quotient)
    return np.where(broken, f32(np.nan), a * factor), back


def fused_scaled(a: Array, b: Array, c: Array, back: Array) -> Array:
    """V_DIV_FMAS_F32: a * b + c, scaled by a power of two where ``scaled`` said so.

    Rounded once, after the scaling, and scaled by 2^64, not by the 2^32 of the guide."""
    factor = np.where(exponent(c) > 127, 2.0**64, 2.0**-64)
    total = _odd_sum(a, b, c)
    return np.where(back, total * factor, total).astype(f32)


def fixed_up(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """V_DIV_FIXUP_F32: sets the quotient's sign and handles special operands."""
    sign = (numerator.view(u32) ^ denominator.view(u32)) & u32(0x8000_0000)
    n_inf, d_inf = np.isinf(numerator), np.isinf(denominator)
    n_zero, d_zero = numerator == 0, denominator == 0
    # A quotient that overflows is inf - inf in between.
    size = np.where(np.isnan(quotient), f32(np.inf), np.abs(quotient))
    vanishing = exponent(numerator) - exponent(denominator) < NEAR_UNDERFLOW
    size = np.where(vanishing | d_inf | n_zero, f32(0), size)
    size = np.where(d_zero | n_inf, f32(np.inf), size).astype(f32)
    invalid = np.isnan(numerator) | np.isnan(denominator) | n_zero & d_zero | n_inf & d_inf
    return np.where(invalid, f32(np.nan), (size.view(u32) | sign).view(f32))


def class_of(a: Array, classes: Array) -> Array:
    """V_CMP_CLASS_F32: whether ``a`` is of a kind whose bit is set in ``classes``."""
    bits = a.view(u32)
    negative, power, fraction = bits >> 31 != 0, bits >> 23 & 255, bits & 0x7F_FFFF
    quiet = fraction >> 22 != 0
    kind = np.select(
        [power == 255, power == 0],
        [
            np.where(fraction == 0, np.where(negative, 2, 9), np.where(quiet, 1, 0)),
            np.where(fraction == 0, np.where(negative, 5, 6), np.where(negative, 4, 7)),
        ],
        np.where(negative, 3, 8),
    ).astype(u32)
    chosen: Array = classes >> kind & u32(1) != 0
    return chosen


def first_lane(a: Array, taking_part: Array | None) -> Array:
    """V_READFIRSTLANE: the value of the first lane that takes part, of lane 0 if none does."""
    if a.shape[1] == 1 or taking_part is None:
        return a[:, 0]
    lane = taking_part.argmax(axis=1)
    if len(lane) == 1:
        return a[:, int(lane[0])]
    found: Array = np.broadcast_to(a, (len(lane), WAVE))[np.arange(len(lane)), lane]
    return found


def lane_of(a: Array, lane: Array) -> Array:
    """V_READLANE: the value of one lane, whether it takes part or not."""
    if a.shape[1] == 1:
        return a[:, 0]
    if len(lane) == 1:
        return a[:, int(lane[0]) & 31]
    found: Array = np.broadcast_to(a, (len(lane), WAVE))[np.arange(len(lane)), lane & 31]
    return found


def with_lane(a: Array, lane: Array, value: Array, waves: int) -> Array:
    """V_WRITELANE: the register with one lane replaced."""
    result = np.broadcast_to(a, (waves, WAVE)).copy()
    result[np.arange(waves), np.broadcast_to(lane & 31, waves)] = value
    return result
