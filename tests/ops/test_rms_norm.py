"""RMS_NORM against the rule in scalar arithmetic, and against binary64."""

import numpy as np
import pytest

from reference.ops.rms_norm import rms_norm
from tests.ops.scalar import rms_norm_row

RELATIVE = 1e-6
"""Against binary64: four roundings an element and a sum folded in at most 12 levels."""


@pytest.mark.parametrize("width", [1, 16, 255, 256, 257, 1024, 1025, 2304])
@pytest.mark.parametrize("weighted", [True, False])
def test_scalar_rule(width, weighted):
    """Every bit, for lengths around every cut."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((2, width), dtype=np.float32) * np.float32(3.0)
    weight = rng.standard_normal(width, dtype=np.float32) if weighted else None
    got = rms_norm(x=x, weight=weight, eps=1e-5)
    for row in range(2):
        assert got[row].tolist() == rms_norm_row(x[row], weight, 1e-5)


def test_groups_are_normed_apart():
    """A group is a row of its own; the weight is shared."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((3, 4 * 40), dtype=np.float32)
    weight = rng.standard_normal(40, dtype=np.float32)
    got = rms_norm(x=x, weight=weight, eps=1e-6, groups=4)
    apart = rms_norm(x=x.reshape(12, 40), weight=weight, eps=1e-6)
    assert (got.reshape(12, 40) == apart).all()


def test_close_to_binary64():
    """Against another arithmetic: a bound, not bits."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((4, 2048), dtype=np.float32)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    assert np.abs(rms_norm(x=x, eps=1e-5) / exact - 1.0).max() < RELATIVE


def test_zeros_and_nan():
    """eps keeps a zero row zero; a NaN stays in its row."""
    x = np.zeros((3, 300), np.float32)
    x[1, 7] = np.nan
    x[2] = 1.0
    got = rms_norm(x=x, eps=1e-5)
    assert not got[0].any()
    assert np.isnan(got[1]).all()
    assert (got[2] == got[2, 0]).all()
