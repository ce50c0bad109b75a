"""SOFT_CAP against binary64 tanh, and its limits."""

import numpy as np
import pytest

from reference.ops.soft_cap import soft_cap

RELATIVE_TO_CAP = 2.5e-7
"""Largest error divided by the cap: tanh's own, three units of 2^-24, and two roundings."""


@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0, 50.0])
def test_close_to_binary64(cap):
    """cap tanh(x / cap) over eight caps."""
    x = np.linspace(-8 * cap, 8 * cap, 20_001, dtype=np.float32)[None]
    exact = cap * np.tanh(x.astype(np.float64) / cap)
    assert np.abs(soft_cap(x=x, cap=cap) - exact).max() <= RELATIVE_TO_CAP * cap


def test_never_beyond_the_cap():
    """Finite input of any size is bounded; signs are kept; NaN is not hidden."""
    x = np.array([[-3e38, -1e5, 0.0, 1e5, 3e38, np.nan]], np.float32)
    got = soft_cap(x=x, cap=30.0)[0]
    assert got[:5].tolist() == [-30.0, -30.0, 0.0, 30.0, 30.0]
    assert np.isnan(got[5])
