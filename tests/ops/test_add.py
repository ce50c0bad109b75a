"""ADD against exact rational addition, rounded once."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference.ops.add import add
from tests.exact.rounding import round32

FLOATS = st.floats(-(2.0**126), 2.0**126, width=32)


@given(pairs=st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=20))
def test_one_rounding(pairs):
    """Every sum is the binary32 nearest to the exact one."""
    a, b = np.array(pairs, np.float32).T[:, None]
    got = add(a=a, b=b)[0]
    for value, (left, right) in zip(got, pairs, strict=True):
        assert Fraction(float(value)) == round32(Fraction(left) + Fraction(right))
