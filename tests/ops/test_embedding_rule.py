"""Rule R11: SCALE(RMS_NORM(h), 1 / sqrt(hidden)) is h over its Euclidean length."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.ops.rms_norm import rms_norm
from reference.ops.scale import scale

ROUNDINGS = 8 * 2.0**-24
"""Of the sum of squares, the mean, the root, the reciprocal and two products, with room."""


def embedding(h: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rule, on final-norm outputs [sequences, hidden]."""
    return scale(x=rms_norm(x=h, eps=0.0), factor=1.0 / math.sqrt(h.shape[1]))


@given(
    seed=st.integers(0, 2**32 - 1),
    hidden=st.sampled_from([1, 2, 40, 896, 1024, 4096]),
    exponent=st.integers(-50, 50),
)
@settings(max_examples=60, deadline=None)
def test_it_is_the_unit_vector(seed: int, hidden: int, exponent: int) -> None:
    """Within a few roundings of binary64, whatever the magnitude."""
    h = np.random.default_rng(seed).standard_normal((2, hidden)).astype(np.float32)
    h = np.ldexp(h, exponent)
    exact = h.astype(np.float64)
    exact /= np.sqrt((exact * exact).sum(axis=1, keepdims=True))
    got = embedding(h)
    assert (np.abs(got - exact) <= ROUNDINGS * np.abs(exact)).all()
    assert np.abs((got.astype(np.float64) ** 2).sum(axis=1) - 1).max() < 2 * ROUNDINGS


def test_a_power_of_two_does_not_change_it() -> None:
    """The direction alone counts: the same bits."""
    h = np.random.default_rng(5).standard_normal((3, 896)).astype(np.float32)
    assert (embedding(h * np.float32(64.0)) == embedding(h)).all()


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_zero_vector_has_no_direction(value: float) -> None:
    """NaN in every component of that sequence, and of no other."""
    h = np.ones((2, 64), np.float32)
    h[0] = value
    with np.errstate(divide="ignore", invalid="ignore"):
        got = embedding(h)
    assert np.isnan(got[0]).all()
    assert (got[1] == np.float32(0.125)).all()
