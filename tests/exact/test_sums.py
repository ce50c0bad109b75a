"""Rules R3 and R4: the folds, against scalar binary32 additions one at a time."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.exact.sums import fold_axis, fold_segment, sum_axis
from tests.exact.rounding import round32


def scalar_segment(values: list[np.float32]) -> np.float32:
    """R4 by recursion on halves of a list of 256."""
    values = values + [np.float32(0.0)] * (256 - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[half + i] for i in range(half)]
    return values[0]


def scalar_total(values: np.ndarray) -> np.float32:
    """R3 over R4 in plain loops."""
    total = np.float32(0.0)
    for span in range(0, len(values), 1024):
        inside = np.float32(0.0)
        for segment in range(span, min(span + 1024, len(values)), 256):
            stop = min(segment + 256, span + 1024, len(values))
            inside = np.float32(inside + scalar_segment(list(values[segment:stop])))
        total = np.float32(total + inside)
    return total


@pytest.mark.parametrize(
    "length", [1, 2, 3, 127, 128, 129, 255, 256, 257, 511, 512, 1023, 1024, 1025, 1281, 2048, 2500]
)
def test_sum_is_the_scalar_fold(length):
    """Every length around a cut, on rows whose order of addition shows."""
    rng = np.random.default_rng(length)
    x = rng.standard_normal((3, length)) * 10.0 ** rng.uniform(-6, 6, (3, length))
    x = x.astype(np.float32)
    got = sum_axis(x)
    for row in range(3):
        assert got[row] == scalar_total(x[row])


BOUNDED = st.floats(-(2.0**100), 2.0**100, width=32)


@given(values=st.lists(BOUNDED, max_size=256))
def test_segment_is_the_scalar_fold(values):
    """Any segment of up to 256 values."""
    x = np.array(values, np.float32)
    assert fold_segment(x) == scalar_segment(list(x))


@given(values=st.lists(BOUNDED, max_size=256))
def test_segment_in_rational_arithmetic(values):
    """The same fold with every addition done exactly and rounded once, on no floating point."""
    exact = [Fraction(v) for v in values] + [Fraction(0)] * (256 - len(values))
    while len(exact) > 1:
        half = len(exact) // 2
        exact = [round32(exact[i] + exact[half + i]) for i in range(half)]
    assert Fraction(float(fold_segment(np.array(values, np.float32)))) == exact[0]


@given(values=st.lists(BOUNDED, max_size=20))
def test_axis_is_a_left_fold_of_spans(values):
    """Any number of segment values."""
    x = np.array(values, np.float32)
    total = np.float32(0.0)
    for span in range(0, len(x), 4):
        inside = np.float32(0.0)
        for value in x[span : span + 4]:
            inside = np.float32(inside + value)
        total = np.float32(total + inside)
    assert fold_axis(x) == total


def test_sum_of_nothing_is_zero():
    """An empty axis sums to +0."""
    assert sum_axis(np.empty((2, 0), np.float32)).tolist() == [0.0, 0.0]


def test_segment_longer_than_256_is_refused():
    """A caller that forgot the cut gets an error, not a wrong sum."""
    with pytest.raises(ValueError, match="256"):
        fold_segment(np.zeros(257, np.float32))


def test_order_shows():
    """Negative control: numpy's own sum, a left fold and one long halving all give other bits."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((64, 2048)) * 10.0 ** rng.uniform(-4, 4, (64, 2048))
    x = x.astype(np.float32)
    got = sum_axis(x)
    assert (got != x.sum(axis=1)).any()
    assert (got != np.cumsum(x, axis=1)[:, -1]).any()
    folded = x
    while folded.shape[1] > 1:
        half = folded.shape[1] // 2
        folded = folded[:, :half] + folded[:, half:]
    assert (got != folded[:, 0]).any()
