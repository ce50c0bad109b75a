"""Least squares of three coefficients none of which is below 0.

By the normal equations in Python numbers: for a few dozen equations LAPACK takes longer, and its
threads spin while they wait for more work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

SINGULAR = 1e-12
"""The part of a column's squared length that must be orthogonal to the other columns; with less the
columns depend on each other as far as doubles can tell."""
ALL = (0, 1, 2)
SUBSETS = [chosen for size in (3, 2, 1) for chosen in combinations(ALL, size)]


Equation = tuple[float, float, float, float]
"""Three factors, and the sum that their products with the coefficients should have."""


def nonnegative(equations: Iterable[Equation]) -> tuple[float, float, float]:
    """The coefficients >= 0 with the least sum of squared errors.

    All seven sets of coefficients that may be above 0 are tried, the set of all three first: where
    its solution is not negative no smaller set is better."""
    aa = ab = ac = bb = bc = cc = ar = br = cr = 0.0
    for a, b, c, value in equations:
        aa += a * a
        ab += a * b
        ac += a * c
        bb += b * b
        bc += b * c
        cc += c * c
        ar += a * value
        br += b * value
        cr += c * value
    lengths = [math.sqrt(square) or 1.0 for square in (aa, bb, cc)]
    a, b, c = lengths
    gram = ((aa / a / a,), (ab / a / b, bb / b / b), (ac / a / c, bc / b / c, cc / c / c))
    right = (ar / a, br / b, cr / c)
    best, most = [0.0, 0.0, 0.0], 0.0
    for chosen in SUBSETS:
        found = _solve(gram, right, chosen)
        if found is None or min(found) < 0:
            continue
        # The sum of squares is smaller by this than with all coefficients 0.
        gain = sum([x * right[i] for x, i in zip(found, chosen, strict=True)])
        if gain > most:
            best, most = [0.0, 0.0, 0.0], gain
            for x, i in zip(found, chosen, strict=True):
                best[i] = x / lengths[i]
        if chosen == ALL:
            break
    return best[0], best[1], best[2]


def _solve(
    gram: Sequence[Sequence[float]], right: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """The solution of the normal equations of the ``chosen`` columns by Cholesky's factorization.
    ``gram`` is the lower triangle, with a diagonal of 1. None if the columns depend on each
    other."""
    factor: list[list[float]] = []
    half: list[float] = []
    for i in chosen:
        row: list[float] = []
        for other, j in zip(factor, chosen, strict=False):
            row.append((gram[i][j] - _dot(row, other)) / other[-1])
        square = gram[i][i] - _dot(row, row)
        if square < SINGULAR:
            return None
        diagonal = math.sqrt(square)
        half.append((right[i] - _dot(row, half)) / diagonal)
        factor.append([*row, diagonal])
    found = [0.0] * len(half)
    for i in reversed(range(len(half))):
        later = sum([found[n] * factor[n][i] for n in range(i + 1, len(half))])
        found[i] = (half[i] - later) / factor[i][i]
    return found


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    """The dot product, up to the length of the shorter one."""
    return sum([x * y for x, y in zip(a, b, strict=False)])
