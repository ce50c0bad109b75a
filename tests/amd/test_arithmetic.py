"""The functions of the table of semantics against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from accel.amd.isa.semantics import table
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
def test_a_fused_product_is_rounded_once(x: float, y: float, z: float) -> None:
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    with np.errstate(all="ignore"):
        found = float(a.fused(single(x), single(y), single(z))[0, 0])
    if isfinite(found) and abs(exact) < Fraction(float(np.finfo(np.float32).max)):
        assert found == rounded(exact)


def test_rounding_twice_is_noticed() -> None:
    """Negative control: a product and a sum that binary64 cannot hold."""
    x, y, z = np.float32(1 + 2**-23), np.float32(1 + 2**-23), np.float32(2**-60)
    half = np.float32(1 + 2**-22 + 2**-23)
    twice = np.float32(np.float64(half) * np.float64(x) + np.float64(z))
    exact = rounded(Fraction(float(half)) * Fraction(float(x)) + Fraction(float(z)))
    assert float(a.fused(single(half), single(x), single(z))[0, 0]) == exact
    assert float(a.fused(single(x), single(y), single(z))[0, 0]) == rounded(
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    )
    assert isinstance(twice, np.float32)


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


def test_the_division_is_correctly_rounded_with_an_inexact_reciprocal() -> None:
    """As the hardware's may be: its last bit is not published."""
    x, y = sample_pairs()
    with np.errstate(all="ignore"):
        for ulps in (-1, 0, 1):
            assert np.array_equal(quotient(x, y, ulps), x / y)


def test_the_division_covers_all_exponents() -> None:
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


@given(U32)
def test_bits(x: int) -> None:
    assert int(a.reversed_bits(word(x))[0, 0]) == int(f"{x:032b}"[::-1], 2)
    if x:
        assert int(a.leading_zeros(word(x))[0, 0]) == 32 - x.bit_length()


@given(U32, U32, U32)
def test_bytes_chosen(x: int, y: int, selector: int) -> None:
    pair = (x << 32 | y).to_bytes(8, "little")
    chosen = []
    for choice in selector.to_bytes(4, "little"):
        if choice < 8:
            chosen.append(pair[choice])
        elif choice < 12:
            chosen.append(255 * (pair[2 * (choice - 8) + 1] >> 7))
        else:
            chosen.append(0 if choice == 12 else 255)
    found = int(a.permuted(word(x), word(y), word(selector))[0, 0])
    assert found == int.from_bytes(bytes(chosen), "little")


@given(U32, U32, U32, st.integers(0, 3))
def test_packed_products(x: int, y: int, z: int, signs: int) -> None:
    def parts(value: int, signed: int) -> list[int]:
        return [b - 256 if signed and b > 127 else b for b in value.to_bytes(4, "little")]

    total = z + sum(p * q for p, q in zip(parts(x, signs & 1), parts(y, signs >> 1), strict=True))
    assert int(a.dot4(word(x), word(y), word(z), signs)[0, 0]) == total % 2**32


@given(U32, U32, st.booleans())
def test_carries(x: int, y: int, carry: bool) -> None:
    c = np.array([[carry]])
    assert bool(a.carried(word(x), word(y), c)[0, 0]) == (x + y + carry > 2**32 - 1)
    assert bool(a.borrowed(word(x), word(y), c)[0, 0]) == (x < y + carry)


@given(st.lists(U32, min_size=1, max_size=5), st.integers(0, 31))
def test_lanes_and_words_are_two_forms_of_a_register(bits: list[int], lane: int) -> None:
    register = np.array(bits, np.uint32)
    mask = a.as_lanes(register)
    assert np.array_equal(a.as_words(mask), register)
    if mask.shape[1] == 32:
        assert np.array_equal(mask[:, lane], register >> np.uint32(lane) & np.uint32(1) != 0)


@given(FLOATS, FLOATS)
@example(float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))
def test_the_larger_of_zeros_is_positive(x: float, y: float) -> None:
    assert float(a.larger(single(x), single(y))[0, 0]) == max(x, y)
    zero = a.larger(single(-0.0), single(0.0))
    assert not np.signbit(zero[0, 0])
    assert np.signbit(a.smaller(single(-0.0), single(0.0))[0, 0])


def test_every_row_is_a_python_expression() -> None:
    """With as many results as types, or one expression for two."""
    for name, row in table().items():
        for expression in row.expressions:
            compile(expression, name, "eval")
        assert 1 <= len(row.expressions) <= len(row.results), name
