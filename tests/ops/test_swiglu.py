"""SWIGLU against binary64 silu and gelu."""

import numpy as np

from reference.exact import elementary
from reference.ops.swiglu import CLAMPED, RELU, swiglu

SILU_RELATIVE = 3.5 * 2.0**-24 * 2
"""silu within 2.5 units in the last place, the product one rounding more."""


def test_silu_against_binary64():
    """Relative error over the range where exp is not clamped."""
    rng = np.random.default_rng(2)
    gate = rng.uniform(-80, 80, (4, 5000)).astype(np.float32)
    up = rng.standard_normal((4, 5000), dtype=np.float32)
    wide = gate.astype(np.float64)
    exact = wide / (1.0 + np.exp(-wide)) * up
    assert (np.abs(swiglu(gate=gate, up=up) - exact) <= SILU_RELATIVE * np.abs(exact)).all()


def test_gelu_is_chosen_by_the_parameter():
    """The two activations differ, and each is the elementary function times up."""
    rng = np.random.default_rng(3)
    gate, up = rng.standard_normal((2, 3, 64), dtype=np.float32)
    assert (swiglu(gate=gate, up=up, activation=1) == elementary.gelu(gate) * up).all()
    assert (swiglu(gate=gate, up=up, activation=0) == elementary.silu(gate) * up).all()
    assert (swiglu(gate=gate, up=up, activation=1) != swiglu(gate=gate, up=up)).any()


def test_saturates():
    """A far gate passes up through or blocks it."""
    gate = np.array([[100.0, -100.0]], np.float32)
    got = swiglu(gate=gate, up=np.array([[2.0, 2.0]], np.float32))[0]
    assert got[0] == 200.0
    assert abs(got[1]) < 1e-30


def test_the_clamped_gate_against_binary64():
    """Far beyond both bounds of the gate and of up, which keeps its one."""
    rng = np.random.default_rng(4)
    gate, up = rng.uniform(-20, 20, (2, 4, 5000)).astype(np.float32)
    g, u = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    exact = g / (1 + np.exp(-float(np.float32(1.702)) * g)) * (u + 1)
    got = swiglu(gate=gate, up=up, activation=CLAMPED)
    assert np.allclose(got, exact, rtol=2e-6, atol=1e-6)
    assert (gate > 7).any()
    assert (np.abs(up) > 7).any()


def test_relu_of_a_value_times_the_value_is_its_square():
    """Every sign and size; a zero has the sign of the other factor."""
    x = np.array([[2.5, -2.5, 0.0, -0.0, 1e-30, -np.inf, 3.0]], np.float32)
    up = np.array([[2.5, -2.5, 1.0, 1.0, 1e30, 1.0, -1.0]], np.float32)
    y = swiglu(gate=x, up=up, activation=RELU)
    assert np.allclose(y, [[6.25, 0, 0, 0, 1, 0, -3]], rtol=1e-6, atol=0)
    assert np.signbit(y).tolist() == [[False, True, False, False, False, False, True]]


def test_bounds_hide_no_nan():
    nan = np.array([np.nan], np.float32)
    one = np.ones(1, np.float32)
    assert np.isnan(swiglu(gate=nan, up=one, activation=CLAMPED)).all()
    assert np.isnan(swiglu(gate=one, up=nan, activation=CLAMPED)).all()
    assert np.isnan(swiglu(gate=nan, up=one, activation=RELU)).all()
