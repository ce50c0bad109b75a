"""Rule R2's functions against binary64, and at the points where they bend."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from reference.exact import elementary

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
SAMPLES = 200_000

ULP_BOUNDS: dict[str, float] = {"exp": 1.0, "log": 1.0, "sigmoid": 2.5, "silu": 2.5}
"""Largest error in units of the last place of the exact value, where |x| < 87."""
ABSOLUTE_BOUNDS: dict[str, float] = {"softplus": 4.8e-7, "tanh": 3.0 * 2.0**-24, "gelu": 4.4e-7}
"""Largest absolute error of the functions that cancel; gelu over |x| <= 6."""


def _silu(x: Float64) -> Float64:
    return x / (1.0 + np.exp(-x))


def _gelu(x: Float64) -> Float64:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


EXACT: dict[str, Callable[[Float64], Float64]] = {
    "exp": np.exp, "log": np.log, "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)), "silu": _silu,
    "softplus": lambda x: np.logaddexp(0.0, x), "tanh": np.tanh, "gelu": _gelu,
}  # fmt: skip


def arguments(name: str) -> Float32:
    """Ordinary, large and very small arguments of a function."""
    rng = np.random.default_rng(20240)
    if name == "log":
        parts = [np.exp(rng.uniform(-80, 80, SAMPLES)), rng.uniform(0.4, 2.5, SAMPLES)]
        return np.concatenate(parts).astype(np.float32)
    limit = 6.0 if name == "gelu" else 87.0
    small = 10.0 ** rng.uniform(-20, 0, SAMPLES) * rng.choice([-1, 1], SAMPLES)
    parts = [rng.uniform(-limit, limit, SAMPLES), small]
    return np.concatenate(parts).astype(np.float32)


def evaluate(name: str, x: Float32) -> Float32:
    """The function under test, without numpy's warnings."""
    with np.errstate(all="ignore"):
        result: Float32 = getattr(elementary, name)(x)
    return result


@pytest.mark.parametrize("name", ULP_BOUNDS)
def test_units_in_the_last_place(name):
    """The measured bound holds over the whole range."""
    x = arguments(name)
    exact = EXACT[name](x.astype(np.float64))
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    error = np.abs(evaluate(name, x).astype(np.float64) - exact) / unit
    assert error.max() <= ULP_BOUNDS[name]


@pytest.mark.parametrize("name", ABSOLUTE_BOUNDS)
def test_absolute_error(name):
    """The measured bound holds; softplus relative to its argument above 1."""
    x = arguments(name)
    exact = EXACT[name](x.astype(np.float64))
    scale = np.maximum(1.0, np.abs(exact) / 4.0) if name == "softplus" else 1.0
    error = np.abs(evaluate(name, x).astype(np.float64) - exact) / scale
    assert error.max() <= ABSOLUTE_BOUNDS[name]


def test_exp_is_exactly_one_at_zero():
    """The weight of a tile's maximum."""
    assert (evaluate("exp", np.array([0.0, -0.0], np.float32)) == 1.0).all()


def test_exp_at_its_lower_limit():
    """-87 itself is computed, the next number below is +0."""
    limit = np.float32(-87.0)
    below = np.nextafter(limit, np.float32(-100.0))
    got = evaluate("exp", np.array([limit, below, -1000.0, -np.inf], np.float32))
    assert got[0] > 0
    assert (got[1:] == 0).all()
    assert not np.signbit(got).any()


def test_exp_at_its_upper_limit():
    """Everything above 87 is e^87."""
    above = np.nextafter(np.float32(87.0), np.float32(100.0))
    got = evaluate("exp", np.array([87.0, above, 1000.0, np.inf], np.float32))
    assert (got == got[0]).all()
    assert np.isfinite(got).all()


def test_exp_steps_down_nowhere():
    """Between neighbouring floats near every change of n, exp does not decrease by over one ulp."""
    for n in range(-100, 101):
        centre = np.float32((n + 0.5) * math.log(2.0))
        x = np.sort(centre + np.arange(-50, 51, dtype=np.float32) * np.spacing(centre))
        y = evaluate("exp", x)
        assert (y[1:] >= np.nextafter(y[:-1], np.float32(0.0))).all()


@pytest.mark.parametrize("name", [n for n in EXACT if n != "log"])
def test_nan_stays_nan(name):
    """No clamp turns a NaN into a number."""
    assert np.isnan(evaluate(name, np.array([np.nan], np.float32))).all()


def test_limits_far_from_zero():
    """The gated functions saturate without a NaN."""
    far = np.array([-1e30, 1e30], np.float32)
    assert evaluate("tanh", far).tolist() == [-1.0, 1.0]
    assert evaluate("softplus", far)[1] == far[1]
    assert evaluate("softplus", far)[0] == 0.0
    assert evaluate("silu", np.array([1000.0], np.float32)) == 1000.0
    assert evaluate("gelu", np.array([-50.0, 50.0], np.float32)).tolist() == [0.0, 50.0]


def _scalar_exp(x: np.float32) -> np.float32:
    """Rule R2 written once more, one scalar rounding a line."""
    f = np.float32
    if np.isnan(x):
        return x
    if x < f(-87.0):
        return f(0.0)
    x = min(x, f(87.0))
    n = f(np.rint(f(x * f(1.44269504088896341))))
    r = f(x - f(n * f(0.693359375)))
    r = f(r - f(n * f(-2.12194440e-4)))
    y = f(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = f(f(y * r) + f(c))
    y = f(f(y * f(r * r)) + r)
    y = f(y + f(1.0))
    return f(y * f(2.0 ** int(n)))


def test_exp_is_the_rule_line_by_line():
    """The vectorized function has the bits of the scalar one."""
    x = arguments("exp")[::97]
    assert (evaluate("exp", x) == np.array([_scalar_exp(v) for v in x])).all()
