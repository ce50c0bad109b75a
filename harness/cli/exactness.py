"""Tests quickly whether this machine's numpy keeps the arithmetic rules.

Binary64 has more than twice the digits of binary32 and two to spare. So the sum, product or
quotient of two binary32 numbers, computed in binary64 (Python's floats) and rounded once more, is
the correctly rounded binary32 result (Figueroa 1995). numpy is compared with it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np

from contract.arithmetic import EXP_LIMIT, SEGMENT
from contract.arrays import Floats
from reference.exact import elementary
from reference.exact.sums import fold_segment

SAMPLES = 512
BLAS_ROWS = 64
BLAS_INNER = 32
"""Inner length for which sums of products stay below 2^24, and so are exact in binary32."""


def broken_rules() -> Iterator[str]:
    """The rules this machine breaks, one line each; nothing when it is exact."""
    for rule, holds in RULES.items():
        if not holds():
            yield rule


def division_is_rounded() -> bool:
    """R0: quotients of binary32 numbers are correctly rounded."""
    a, b = _samples(1), _samples(2)
    return [rounded(x / y) for x, y in zip(_list(a), _list(b), strict=True)] == _list(a / b)


def products_are_not_contracted() -> bool:
    """R0: x * y + z rounds the product before it adds."""
    a, b = _samples(3), _samples(4)
    c = -(a * b)
    apart = [
        rounded(rounded(x * y) + z) for x, y, z in zip(_list(a), _list(b), _list(c), strict=True)
    ]
    return apart == _list(a * b + c)


def exp_is_exact() -> bool:
    """R2: exp is the fixed sequence of rounded operations."""
    x = np.linspace(-90.0, 87.0, SAMPLES, dtype=np.float32)
    return [_exp(value) for value in _list(x)] == _list(elementary.exp(x))


def fold_is_in_halves() -> bool:
    """R4: a segment is summed in halves."""
    values = _samples(5, SEGMENT)
    expected = _list(values)
    while len(expected) > 1:
        half = len(expected) // 2
        pairs = zip(expected[:half], expected[half:], strict=True)
        expected = [rounded(x + y) for x, y in pairs]
    return expected == [float(fold_segment(values))]


def blas_is_exact_on_integers() -> bool:
    """R5: a product of integer matrices in binary32 BLAS equals the one in 64-bit integers."""
    generator = np.random.default_rng(6)
    m = generator.integers(-2047, 2048, (BLAS_ROWS, BLAS_INNER))
    q = generator.integers(0, 16, (BLAS_INNER, BLAS_ROWS))
    product = m.astype(np.float32) @ q.astype(np.float32)
    return bool((product == m @ q).all())


RULES: dict[str, Callable[[], bool]] = {
    "binary32 division is not correctly rounded": division_is_rounded,
    "multiply and add are contracted": products_are_not_contracted,
    "exp differs from rule R2": exp_is_exact,
    "sums differ from rule R4": fold_is_in_halves,
    "BLAS is not exact on integers": blas_is_exact_on_integers,
}


def rounded(value: float) -> float:
    """The binary32 number nearest to ``value``, without numpy."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _exp(x: float) -> float:
    """Rule R2's exp in Python floats, each operation rounded to binary32."""
    if x < -EXP_LIMIT:
        return 0.0
    r = rounded
    n = float(round(r(x * float(elementary.LOG2_E))))
    reduced = r(x - r(n * float(elementary.LN2_HIGH)))
    reduced = r(reduced - r(n * float(elementary.LN2_LOW)))
    first, *rest = (float(c) for c in elementary.EXP_POLYNOMIAL)
    y = r(r(reduced * first) + rest[0])
    for coefficient in rest[1:]:
        y = r(r(y * reduced) + coefficient)
    y = r(y * r(reduced * reduced))
    y = r(r(y + reduced) + 1.0)
    return r(y * 2.0**n)


def _samples(seed: int, count: int = SAMPLES) -> Floats:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def _list(values: Floats) -> list[float]:
    return [float(value) for value in values]
