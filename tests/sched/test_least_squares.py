"""Three coefficients, none below 0: as good as the best found by LAPACK among all sets of them."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.sched.least_squares import nonnegative

FACTORS = st.floats(0, 1e4).map(lambda x: round(x, 3))
EQUATIONS = st.lists(st.tuples(FACTORS, FACTORS, FACTORS, st.floats(-1e3, 1e3)), max_size=30)


def squares(rows: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    errors: NDArray[np.float64] = rows[:, :3] @ found - rows[:, 3]
    return float((errors * errors).sum())


def least(rows: NDArray[np.float64]) -> float:
    """The least sum of squared errors, by trying every set of coefficients."""
    best = squares(rows, np.zeros(3))
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            found = np.zeros(3)
            found[chosen] = np.linalg.lstsq(rows[:, chosen], rows[:, 3])[0]
            if (found >= 0).all():
                best = min(best, squares(rows, found))
    return best


@given(EQUATIONS)
def test_nothing_is_below_zero_and_nothing_better(equations):
    rows = np.array(equations, np.float64).reshape(-1, 4)
    found = np.array(nonnegative(equations))
    assert (found >= 0).all()
    everything = float((rows[:, 3] ** 2).sum())
    assert squares(rows, found) <= least(rows) + 1e-6 * everything


def test_what_is_exact_is_found():
    rows = [(1.0, tokens, at, 4e-3 + 2e-4 * tokens + 3e-7 * at) for tokens, at in POINTS]
    assert nonnegative(rows) == pytest.approx((4e-3, 2e-4, 3e-7), rel=1e-9)


POINTS = [(1.0, 100.0), (16.0, 20_000.0), (64.0, 1_000.0), (512.0, 150_000.0)]


def test_columns_that_depend_on_each_other_share_nothing():
    """Where two say the same, one of them explains it all."""
    rows = [(1.0, tokens, 50 * tokens, 1.0 + tokens) for tokens in (1.0, 2.0, 7.0)]
    first, second, third = nonnegative(rows)
    assert first == pytest.approx(1.0)
    assert second + 50 * third == pytest.approx(1.0)
    assert min(second, third) == 0.0


def test_of_nothing_nothing_follows():
    assert nonnegative([]) == (0.0, 0.0, 0.0)
    assert nonnegative([(1.0, 2.0, 3.0, -4.0)]) == (0.0, 0.0, 0.0)
