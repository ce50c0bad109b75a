"""MOE_SWIGLU against binary64."""

import numpy as np
import pytest

from reference.exact import elementary
from reference.ops.moe_swiglu import moe_swiglu

FUNCTIONS = {0: elementary.silu, 1: elementary.gelu, 2: elementary.sigmoid}


def test_silu_against_binary64():
    """Every expert's gate, relative to the exact value."""
    gate, up = np.random.default_rng(1).standard_normal((2, 3, 4, 50), dtype=np.float32)
    wide = gate.astype(np.float64)
    exact = wide / (1.0 + np.exp(-wide)) * up
    assert np.allclose(moe_swiglu(gate=gate, up=up), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_the_parameter_chooses_the_function(activation):
    """Only the gate passes through it, and the shape stays."""
    gate, up = np.random.default_rng(2).standard_normal((2, 2, 3, 17), dtype=np.float32)
    y = moe_swiglu(gate=gate, up=up, activation=activation)
    assert y.shape == gate.shape
    assert (y == FUNCTIONS[activation](gate) * up).all()
    assert (y != moe_swiglu(gate=up, up=gate, activation=activation)).any()
