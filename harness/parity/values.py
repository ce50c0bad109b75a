"""Activation values for tests: ordinary, extreme and broken ones."""

from collections.abc import Callable, Mapping

import numpy as np

from contract.arrays import Floats

Generator = np.random.Generator

TINY = np.float32(2.0**-62)
"""A scale that yields values on both sides of 2^-64, below which rule R5 rounds a segment to
zero."""
HUGE = np.float32(2.0**40)
"""A scale whose cube, summed over thousands of elements, is still finite."""
SUBNORMAL = np.float32(2.0**-130)


def _normal(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def _negative_zero(rng: Generator, shape: tuple[int, ...]) -> Floats:
    return np.where(rng.random(shape) < 0.5, np.float32(-0.0), _normal(rng, shape))


def _denormal(rng: Generator, shape: tuple[int, ...]) -> Floats:
    x = _normal(rng, shape)
    return np.where(rng.random(shape) < 0.7, x * SUBNORMAL, x)


def _zeros(rng: Generator, shape: tuple[int, ...]) -> Floats:
    """Rows of -0, of +0 and of both: no result may depend on a zero's sign (rule R0)."""
    zeros = np.zeros(shape, np.float32)
    zeros[::2] = -0.0
    zeros[2::4, ..., ::3] = 0.0
    return zeros


def _scales(rng: Generator, shape: tuple[int, ...]) -> Floats:
    """Rows of every magnitude, down to rows that rule R6 treats as zero."""
    exponents = rng.integers(-44, 7, (*shape[:-1], 1))
    return np.ldexp(_normal(rng, shape), exponents)


def _poisoned(poison: float) -> Callable[[Generator, tuple[int, ...]], Floats]:
    def fill(rng: Generator, shape: tuple[int, ...]) -> Floats:
        x = _normal(rng, shape)
        if x.size:
            x[tuple(rng.integers(0, shape))] = poison * (1.0 if rng.random() < 0.5 else -1.0)
        return x

    return fill


KINDS: Mapping[str, Callable[[Generator, tuple[int, ...]], Floats]] = {
    "normal": _normal,
    "tiny": lambda rng, shape: _normal(rng, shape) * TINY,
    "huge": lambda rng, shape: _normal(rng, shape) * HUGE,
    "negative_zero": _negative_zero,
    "denormal": _denormal,
    "zeros": _zeros,
    "scales": _scales,
    "nan": _poisoned(np.nan),
    "inf": _poisoned(np.inf),
}
NONFINITE = frozenset({"nan", "inf"})
"""Kinds with which a result may be NaN or infinite; with all others it must be finite."""
OF_PAGES = frozenset({"scales"})
"""Kinds used only for opcodes that access KV pages."""
BREAKS_ROWS = frozenset({"huge"})
"""Kinds whose rows rule R6 treats as broken, so opcodes that access KV pages may give NaN; so may
SSM_SCAN, which multiplies four large numbers."""
