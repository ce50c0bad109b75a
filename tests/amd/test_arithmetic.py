"""The functions of the table of semantics against exact arithmetic."""

from fractions import Fraction
from math import isfinite

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from accel.amd.sim import arithmetic as a
from accel.packets.samples import sample_pairs

U32 = st.integers(0, 2**32 - 1)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def word(value: int) -> NDArray[np.uint32]:
    return np.array([[value]], np.uint32)


def single(value: float) -> NDArray[np.float32]:
    return np.array([[value]], np.float32)


def rounded(value: Fraction) -> float:
    """Nearest binary32, ties to even; by halving an interval of neighbours."""
    with np.errstate(over="ignore"):
        near = np.float32(float(value))
        if not np.isfinite(near):
            return float(near)
        neighbours = [near, *(np.nextafter(near, np.float32(limit)) for limit in (-np.inf, np.inf))]
    finite = [n for n in neighbours if np.isfinite(n)]
    return float(min(finite, key=lambda n: (abs(Fraction(float(n)) - value), _odd(n))))


def _odd(value: np.float32) -> int:
    return int(np.array(value).view(np.uint32)) & 1


@given(FLOATS, FLOATS, FLOATS)
def test_a_fused_product_is_rounded_once(x, y, z):
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    with np.errstate(all="ignore"):
        found = float(a.fused(single(x), single(y), single(z))[0, 0])
    if isfinite(found) and abs(exact) < Fraction(float(np.finfo(np.float32).max)):
        assert found == rounded(exact)


def test_rounding_twice_is_noticed():
    """Negative control: a product and a sum that binary64 cannot hold."""
    x, z = 1 + 2.0**-12, 2.0**-60
    exact = rounded(Fraction(x) ** 2 + Fraction(z))
    assert float(a.fused(single(x), single(x), single(z))[0, 0]) == exact
    assert float(np.float32(x * x + z)) != exact


def quotient(x: NDArray[np.float32], y: NDArray[np.float32], ulps: int) -> NDArray[np.float32]:
    """The compiler's division, its reciprocal off by ``ulps``."""
    one = np.ones_like(x)
    bottom, _ = a.scaled(y, y, x)
    top, back = a.scaled(x, y, x)
    r = (a.reciprocal(bottom).view(np.int32) + ulps).view(np.float32)
    r = a.fused(a.fused(-bottom, r, one), r, r)
    q = top * r
    q = a.fused(a.fused(-bottom, q, top), r, q)
    q = a.fused_scaled(a.fused(-bottom, q, top), r, q, back)
    return a.fixed_up(q, y, x)


def test_the_division_is_correctly_rounded_with_an_inexact_reciprocal():
    """As the hardware's may be: its last bit is not published."""
    x, y = sample_pairs()
    with np.errstate(all="ignore"):
        for ulps in (-1, 0, 1):
            assert np.array_equal(quotient(x, y, ulps), x / y)


def test_the_division_covers_all_exponents():
    """Normal quotients of any normal numbers, and the special ones."""
    rng = np.random.default_rng(5)
    bits = rng.integers(1 << 23, 255 << 23, (2, 1 << 14), dtype=np.uint32)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000], np.uint32)
    pairs = np.stack(np.meshgrid(special, special)).reshape(2, -1)
    x, y = np.concatenate([bits, pairs], axis=1).view(np.float32)
    with np.errstate(all="ignore"):
        expected, found = x / y, quotient(x, y, 0)
    normal = (np.abs(expected) >= 2.0**-126) | ~np.isfinite(expected) | (x == 0) | np.isinf(y)
    assert np.array_equal(found[normal], expected[normal], equal_nan=True)


@given(U32, U32, st.booleans())
def test_bits_and_carries(x, y, carry):
    """What few kernels have, for rare operands."""
    c = np.array([[carry]])
    assert bool(a.carried(word(x), word(y), c)[0, 0]) == (x + y + carry > 2**32 - 1)
    assert bool(a.borrowed(word(x), word(y), c)[0, 0]) == (x < y + carry)
    assert int(a.reversed_bits(word(x))[0, 0]) == int(f"{x:032b}"[::-1], 2)
    assert int(a.leading_zeros(word(x | 1))[0, 0]) == 32 - (x | 1).bit_length()


@given(FLOATS, FLOATS)
@example(float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))
def test_the_larger_of_zeros_is_positive(x, y):
    assert float(a.larger(single(x), single(y))[0, 0]) == max(x, y)
    zero = a.larger(single(-0.0), single(0.0))
    assert not np.signbit(zero[0, 0])
    assert np.signbit(a.smaller(single(-0.0), single(0.0))[0, 0])
