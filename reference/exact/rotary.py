"""Rule R2: rotary tables without any library's sin, cos or pow.

Frequencies are correctly rounded binary64 powers; angles are binary64 products; sine and cosine
are fixed binary64 polynomials (fdlibm's kernels) after a three-part reduction by pi/2. The table
is rounded to binary32 once, so every tier reads the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats
from contract.lazy_dataclass import dataclass

Float64 = NDArray[np.float64]

TWO_OVER_PI = 6.36619772367581382433e-01
PI_OVER_2_HIGH = 1.57079632673412561417e00
PI_OVER_2_MIDDLE = 6.07710050630396597660e-11
PI_OVER_2_LOW = 2.02226624871116645580e-21
SIN_POLYNOMIAL = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
COS_POLYNOMIAL = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)
DECIMAL_DIGITS = 60
MAX_ANGLE = 2.0**20
"""Largest angle in radians: above it the multiple of the high part of pi/2 is not exact."""
BLOCK_ANGLES = 1 << 13
"""Angles computed at a time, so that the temporaries of a long table stay in the cache."""


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """The scaling of a model's rotary angles.

    ``factor`` is the linear scaling (angle / factor). ``yarn`` blends scaled and unscaled angles by
    frequency, for a model trained on ``original_context`` positions. Sine and cosine are multiplied
    by ``attention_factor`` and, with ``yarn`` and a factor above 1, by ``(1 + 0.1 ln factor)`` and
    divided by ``(1 + 0.1 log_multiplier ln factor)``."""

    factor: float = 1.0
    yarn: bool = False
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0


def frequencies(base: float, rotary_dim: int) -> Float64:
    """base^(-2 m / rotary_dim) for m < rotary_dim / 2, each correctly rounded to binary64."""
    with localcontext() as context:
        context.prec = DECIMAL_DIGITS
        exact_base = Decimal(base)
        return np.array(
            [
                float(exact_base ** (Decimal(-2 * m) / Decimal(rotary_dim)))
                for m in range(rotary_dim // 2)
            ],
            dtype=np.float64,
        )


def sine_cosine(angle: Float64) -> tuple[Float64, Float64]:
    """Sine and cosine of |angle| <= 2^20, each to within 2^-52."""
    n = np.rint(angle * TWO_OVER_PI)
    r = angle - n * PI_OVER_2_HIGH
    r = r - n * PI_OVER_2_MIDDLE
    r = r - n * PI_OVER_2_LOW
    z = r * r
    sine = _horner(SIN_POLYNOMIAL, z)
    sine = r + (r * z) * sine
    cosine = _horner(COS_POLYNOMIAL, z)
    cosine = 1.0 - (0.5 * z - (z * z) * cosine)
    quadrant = n.astype(np.int64) & 3
    swap = (quadrant & 1).astype(bool)
    sin_out = np.where(swap, cosine, sine)
    cos_out = np.where(swap, sine, cosine)
    return (
        np.where(quadrant >= 2, -sin_out, sin_out),
        np.where((quadrant == 1) | (quadrant == 2), -cos_out, cos_out),
    )


def rotary_table(
    context: int,
    base: float,
    rotary_dim: int,
    scaling: RotaryScaling | None = None,
    factors: Sequence[float] | None = None,
) -> Floats:
    """The table of cosines and sines: float32 [context, 2, rotary_dim / 2], cosines first.

    ``factors`` divide the frequencies one by one (``rope_freqs``). Raises ValueError when an angle
    would exceed ``MAX_ANGLE``."""
    scaling = scaling or RotaryScaling()
    frequency = frequencies(base, rotary_dim)
    if factors is not None:
        frequency = frequency / np.asarray(factors, dtype=np.float64)
    magnitude = scaling.attention_factor
    if scaling.yarn:
        frequency = _yarn(frequency, base, rotary_dim, scaling)
        magnitude = _yarn_magnitude(scaling)
    elif scaling.factor != 1.0:
        frequency = frequency * (1.0 / scaling.factor)
    if context > MAX_ANGLE or (context - 1) * float(frequency.max(initial=0.0)) > MAX_ANGLE:
        raise ValueError(f"a context of {context} positions exceeds angles of {MAX_ANGLE:.0f}")
    position = np.arange(context, dtype=np.float64)
    table = np.empty((context, 2, len(frequency)), np.float32)
    step = max(1, BLOCK_ANGLES // max(1, len(frequency)))
    for first in range(0, context, step):
        sine, cosine = sine_cosine(position[first : first + step, None] * frequency)
        table[first : first + step, 0] = cosine * magnitude
        table[first : first + step, 1] = sine * magnitude
    return table


def unrotated_table(context: int, rotary_dim: int) -> Floats:
    """The table of the angle 0: it leaves every finite number's value as it is."""
    table = np.zeros((context, 2, rotary_dim // 2), np.float32)
    table[:, 0] = 1.0
    return table


def growth_table(context: int, length: int, factor: float, offset: int = 0) -> Floats:
    """The table of the angle 0 whose cosine is 1 + factor ln(1 + floor((position + offset) /
    length)), for one pair: a rotation by it multiplies two channels by the cosine."""
    end = context + offset
    steps = [1.0 + factor * _ln(1.0 + step) for step in range((end - 1) // length + 1)]
    table = np.zeros((context, 2, 1), np.float32)
    table[:, 0, 0] = np.repeat(np.array(steps, np.float32), length)[offset:end]
    return table


def _horner(coefficients: Sequence[float], x: Float64) -> Float64:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _ln(x: float) -> float:
    with localcontext() as context:
        context.prec = DECIMAL_DIGITS
        return float(Decimal(x).ln())


def yarn_growth(factor: float, multiplier: float) -> float:
    """1 + 0.1 ``multiplier`` ln ``factor``, 1 where nothing is scaled."""
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * multiplier * _ln(factor)


def _yarn_magnitude(scaling: RotaryScaling) -> float:
    grown, shrunk = (yarn_growth(scaling.factor, m) for m in (1.0, scaling.log_multiplier))
    return grown / shrunk * scaling.attention_factor


def _yarn(frequency: Float64, base: float, rotary_dim: int, scaling: RotaryScaling) -> Float64:
    """NTK-by-parts interpolation (YaRN, arXiv 2309.00071), on frequencies instead of angles."""

    def correction(rotations: float) -> float:
        if base == 1.0:
            raise ValueError("YaRN needs frequencies that differ")
        turns = scaling.original_context / (rotations * 2.0 * np.pi)
        return rotary_dim * _ln(turns) / (2.0 * _ln(base))

    low = max(0.0, float(np.floor(correction(scaling.beta_fast))))
    high = min(rotary_dim - 1.0, float(np.ceil(correction(scaling.beta_slow))))
    pair = np.arange(rotary_dim // 2, dtype=np.float64)
    ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    return frequency * ramp + (frequency * (1.0 / scaling.factor)) * (1.0 - ramp)
