"""SCALE: the factor is rounded to binary32 before it multiplies."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference.ops.scale import scale
from tests.exact.rounding import round32

FLOATS = st.floats(-(2.0**60), 2.0**60, width=32)


@given(values=st.lists(FLOATS, min_size=1, max_size=20), factor=st.floats(-100.0, 100.0))
def test_two_roundings(values, factor):
    """round(x * round(factor)), exactly."""
    got = scale(x=np.array([values], np.float32), factor=factor)[0]
    rounded = round32(Fraction(factor))
    for value, x in zip(got, values, strict=True):
        assert Fraction(float(value)) == round32(Fraction(x) * rounded)


def test_factor_in_binary64_would_differ():
    """Negative control: a tenth in binary64 gives other bits for some x."""
    x = np.arange(1, 2000, dtype=np.float32)[None]
    unrounded = (x.astype(np.float64) * 0.1).astype(np.float32)
    assert (scale(x=x, factor=0.1) != unrounded).any()
