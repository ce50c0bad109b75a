"""XIELU against binary64, and at its bounds."""

import numpy as np

from reference.ops.xielu import xielu

TOLERANCE = 4e-7
"""Of results of size 1: exp minus 1 is rounded where it is small, products four times."""
PARAMETERS = np.array([0.8, 1.3, 0.5, -1e-6], np.float32)


def test_close_to_binary64():
    """On both sides of 0, where the parts meet as well."""
    x = np.concatenate([np.linspace(-30, 30, 20_001), np.linspace(-1e-3, 1e-3, 2001)])
    x = x.astype(np.float32)[None]
    p, n, b, e = PARAMETERS.astype(np.float64)
    wide = x.astype(np.float64)
    exact = np.where(wide > 0, p * wide**2, n * (np.expm1(np.minimum(wide, e)) - wide)) + b * wide
    error = np.abs(xielu(x=x, parameters=PARAMETERS) - exact) / np.maximum(1.0, np.abs(exact))
    assert error.max() <= TOLERANCE


def test_zero_is_the_bound_of_the_exponential_part():
    """exp(e) - 1 and not 0: what the authors' formula gives."""
    got = xielu(x=np.zeros((1, 1), np.float32), parameters=np.float32([1, 2, 0.5, -0.25]))
    assert np.allclose(got, 2 * np.expm1(-0.25), rtol=1e-6)


def test_nan_is_not_hidden():
    x = np.array([[np.nan, 1.0]], np.float32)
    assert np.isnan(xielu(x=x, parameters=PARAMETERS)).tolist() == [[True, False]]
