"""SSM_GATED_NORM against the rule in scalar arithmetic, and against binary64."""

import numpy as np
import pytest

from reference.exact.elementary import silu
from reference.ops.ssm_gated_norm import ssm_gated_norm
from tests.ops import recurrent_float64
from tests.ops.scalar import F, rms_norm_row

RELATIVE = 1e-6
HEADS = 3


def inputs(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, gate and weight."""
    rng = np.random.default_rng(width)
    x, gate = rng.standard_normal((2, 4, HEADS * width), dtype=np.float32)
    return x, gate, rng.standard_normal(width, dtype=np.float32)


@pytest.mark.parametrize("width", [1, 40, 128, 300])
def test_scalar_rule(width):
    """Every bit: the weight before the gate, each product rounded."""
    x, gate, weight = inputs(width)
    got = ssm_gated_norm(x=x, gate=gate, weight=weight, eps=1e-5, heads=HEADS)
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        normed = rms_norm_row(x[0, part], weight, 1e-5)
        gates = silu(gate[0, part])
        expected = [F(a * b) for a, b in zip(normed, gates, strict=True)]
        assert got[0, part].tolist() == expected


def test_close_to_binary64_and_mistakes_are_not():
    """A bound, and what it would notice."""
    x, gate, weight = inputs(64)
    got = ssm_gated_norm(x=x, gate=gate, weight=weight, eps=0.1, heads=HEADS)
    wide = [part.astype(np.float64) for part in (x, gate, weight)]
    exact = recurrent_float64.gated_norm(*wide, 0.1, HEADS)
    assert np.abs(got / exact - 1.0).max() < RELATIVE
    for mistake in recurrent_float64.NORM_MISTAKES:
        wrong = recurrent_float64.gated_norm(*wide, 0.1, HEADS, mistake)
        assert np.abs(got / wrong - 1.0).max() > 1000 * RELATIVE, mistake


def test_a_broken_token_stays_alone():
    """A NaN breaks its own head of its own token."""
    x, gate, weight = inputs(16)
    x[1, 20] = np.nan
    got = ssm_gated_norm(x=x, gate=gate, weight=weight, eps=1e-5, heads=HEADS)
    broken = np.isnan(got).reshape(4, HEADS, 16)
    assert broken[1, 1].all()
    assert broken.sum() == 16


def test_an_empty_step():
    """No tokens, no result."""
    none = np.empty((0, 48), np.float32)
    weight = np.ones(16, np.float32)
    assert ssm_gated_norm(x=none, gate=none, weight=weight, eps=0.1, heads=3).shape == (0, 48)
