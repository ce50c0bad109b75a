"""Rule R2: elementary functions as fixed sequences of correctly rounded binary32 operations.

The polynomials are those of the Cephes single-precision library. Every line rounds once; a tier's
kernel must repeat the lines in this order, without fusing multiplications and additions."""

from __future__ import annotations

import numpy as np

from contract.arithmetic import EXP_LIMIT
from contract.arrays import Floats

ONE = np.float32(1.0)
TWO = np.float32(2.0)
HALF = np.float32(0.5)
LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
EXP_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
LOG_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
SQRT_HALF = np.float32(0.707106781186547524)
SQRT_TWO_OVER_PI = np.float32(0.7978845608028654)
GELU_CUBIC = np.float32(0.044715)


def _horner(coefficients: tuple[np.float32, ...], x: Floats) -> Floats:
    value = x * coefficients[0]
    value += coefficients[1]
    for coefficient in coefficients[2:]:
        value *= x
        value += coefficient
    return value


def exp(x: Floats) -> Floats:
    """e^x with x clamped to [-87, 87]; +0 below -87. NaN stays NaN. Same shape as ``x``."""
    with np.errstate(invalid="ignore"):
        clamped = np.minimum(np.maximum(x, np.float32(-EXP_LIMIT)), np.float32(EXP_LIMIT))
        n = np.rint(clamped * LOG2_E)
        r = clamped - n * LN2_HIGH
        r -= n * LN2_LOW
        y = _horner(EXP_POLYNOMIAL, r)
        y *= r * r
        y += r
        y += ONE
        exponent = np.where(np.isnan(n), np.float32(0.0), n).astype(np.int32)
    y *= ((exponent + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.where(x < np.float32(-EXP_LIMIT), np.float32(0.0), y)


def log(x: Floats) -> Floats:
    """Natural logarithm of a positive finite ``x``."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < SQRT_HALF
    e = np.where(small, exponent - 1, exponent).astype(np.float32)
    f = np.where(small, mantissa + mantissa, mantissa) - ONE
    z = f * f
    y = _horner(LOG_POLYNOMIAL, f)
    y *= f
    y *= z
    y += LN2_LOW * e
    y -= HALF * z
    total = f + y
    total += LN2_HIGH * e
    return total


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    return ONE / (ONE + exp(-x))


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x))."""
    return x / (ONE + exp(-x))


def softplus(x: Floats) -> Floats:
    """ln(1 + e^x) as max(x, 0) + (log(u) + (e - (u - 1))), e = exp(-|x|), u = 1 + e."""
    e = exp(-np.abs(x))
    u = ONE + e
    return np.maximum(x, np.float32(0.0)) + (log(u) + (e - (u - ONE)))


def tanh(x: Floats) -> Floats:
    """1 - 2 / (exp(x + x) + 1)."""
    return ONE - TWO / (exp(x + x) + ONE)


def gelu(x: Floats) -> Floats:
    """(0.5 x) (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    cube = (x * x) * x
    return (HALF * x) * (ONE + tanh(SQRT_TWO_OVER_PI * (x + GELU_CUBIC * cube)))
