"""Least squares of three coefficients none of which is below 0.

In plain numbers, by the normal equations: for a few dozen equations LAPACK takes longer, and its
threads wait for more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

SINGULAR = 1e-12
"""Of a column's squared length, what must be left beside the other columns: with less it depends
on them as far as doubles can tell."""
ALL = (0, 1, 2)
SUBSETS = [chosen for size in (3, 2, 1) for chosen in combinations(ALL, size)]


Equation = tuple[float, float, float, float]
"""Three factors, and what their products with the coefficients should come to."""


def nonnegative(equations: Iterable[Equation]) -> tuple[float, float, float]:
    """The coefficients >= 0 with the least sum of squared errors.

    The best set of those that are not 0 is found by trying all seven, all three first: where none
    of these is negative no fewer are better.
    """
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
        # By so much the sum of squares is less than without any coefficient.
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
    """The solution of the normal equations of the ``chosen`` columns by Cholesky's factorization;
    of ``gram`` what is below its diagonal, and that, which is 1. None where the columns depend on
    each other."""
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
    """As far as both reach."""
    return sum([x * y for x, y in zip(a, b, strict=False)])
