"""Rule R5, first half, against rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.exact.activation import quantize_activation

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest_even(x: Fraction) -> int:
    """Round half to even; Python's round on a Fraction does just that."""
    return round(x)


def by_fractions(segment: np.ndarray) -> tuple[list[int], Fraction]:
    """The rule as written, without a single rounding but rint."""
    largest = max((abs(Fraction(float(v))) for v in segment), default=Fraction(0))
    if largest < Fraction(1, 2**64):
        return [0] * len(segment), Fraction(0)
    exponent = math.floor(math.log2(largest))
    while Fraction(2) ** exponent > largest:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= largest:
        exponent += 1
    scale = Fraction(2) ** (exponent - 10)
    integers = [nearest_even(Fraction(float(v)) / scale) for v in segment]
    return [max(-2047, min(2047, m)) for m in integers], scale


@given(values=st.lists(FLOATS, min_size=1, max_size=40))
def test_integers_and_scale(values):
    """Any finite segment: the integers and the power of two are exactly the rule's."""
    x = np.array([values], np.float32)
    got = quantize_activation(x)
    m, scale = by_fractions(x[0])
    assert got.m[0].tolist() == m
    assert Fraction(float(got.scale[0, 0])) == scale


@given(power=st.integers(-64, 127), sign=st.sampled_from([-1.0, 1.0]))
def test_power_of_two_is_1024_quanta(power, sign):
    """2^E <= a: a power of two opens its own binade."""
    got = quantize_activation(np.array([[sign * 2.0**power]], np.float32))
    assert got.m[0, 0] == sign * 1024
    assert got.scale[0, 0] == np.float32(2.0 ** (power - 10))


def test_just_below_a_power_of_two_is_clamped():
    """The largest float below 2 would round to 2048 and becomes 2047."""
    x = np.nextafter(np.float32(2.0), np.float32(0.0))
    got = quantize_activation(np.array([[x, -x]], np.float32))
    assert got.m.tolist() == [[2047, -2047]]
    assert got.scale[0, 0] == np.float32(2.0**-10)


def test_threshold_of_silence():
    """a < 2^-64 gives zeros and a zero scale; 2^-64 itself does not."""
    at = np.float32(2.0**-64)
    below = np.nextafter(at, np.float32(0.0))
    got = quantize_activation(np.array([[at], [below]], np.float32))
    assert got.m.tolist() == [[1024], [0]]
    assert got.scale[:, 0].tolist() == [2.0**-74, 0.0]


@pytest.mark.parametrize(
    ("halves", "expected"), [(1, 0), (3, 2), (5, 2), (7, 4), (-1, 0), (-3, -2)]
)
def test_ties_go_to_even(halves, expected):
    """Half quanta beside a largest element of 1."""
    x = np.array([[1.0, halves * 2.0**-11]], np.float32)
    assert quantize_activation(x).m[0, 1] == expected


def test_segments_are_cut_at_multiples_of_256():
    """A loud element changes the scale of its own segment only; a short one stands alone."""
    x = np.full((1, 600), 1.0, np.float32)
    x[0, 255] = 64.0
    x[0, 599] = 4.0
    got = quantize_activation(x)
    assert got.scale.tolist() == [[2.0**-4, 2.0**-10, 2.0**-8]]
    assert got.m[0, [0, 256, 512]].tolist() == [16, 1024, 256]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_broken_segment_breaks_its_own_token_only(poison):
    """The scale turns NaN and the integers 0; the other token is as without it."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 512)).astype(np.float32)
    clean = quantize_activation(x)
    x[0, 300] = poison
    got = quantize_activation(x)
    assert np.isnan(got.scale[0, 1])
    assert not got.m[0, 256:].any()
    assert got.scale[0, 0] == clean.scale[0, 0]
    assert (got.m[1] == clean.m[1]).all()
    assert (got.scale[1] == clean.scale[1]).all()


def test_no_tokens():
    """An empty step quantizes to nothing."""
    got = quantize_activation(np.empty((0, 300), np.float32))
    assert got.m.shape == (0, 300)
    assert got.scale.shape == (0, 2)
