"""Least squares with three coefficients >= 0.

Solves the normal equations in Python numbers: for a few dozen equations LAPACK is slower, and its
threads spin while they wait for work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

SINGULAR = 1e-12
"""If less than this part of a column's squared length is orthogonal to the other columns, the
columns count as linearly dependent."""
ALL = (0, 1, 2)
SUBSETS = [chosen for size in (3, 2, 1) for chosen in combinations(ALL, size)]


Equation = tuple[float, float, float, float]
"""Three factors and the target of their sum of products with the coefficients."""


def nonnegative(equations: Iterable[Equation]) -> tuple[float, float, float]:
    """The coefficients >= 0 with the smallest sum of squared errors.

    Tries each of the seven subsets of coefficients that may be above 0, the full set first: if its
    solution has no negative coefficient, no smaller subset is better."""
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
    best, greatest = [0.0, 0.0, 0.0], 0.0
    for chosen in SUBSETS:
        found = _solve(gram, right, chosen)
        if found is None or min(found) < 0:
            continue
        # How much smaller the sum of squares is than with all coefficients 0.
        gain = sum([x * right[i] for x, i in zip(found, chosen, strict=True)])
        if gain > greatest:
            best, greatest = [0.0, 0.0, 0.0], gain
            for x, i in zip(found, chosen, strict=True):
                best[i] = x / lengths[i]
        if chosen == ALL:
            break
    return best[0], best[1], best[2]


def _solve(
    gram: Sequence[Sequence[float]], right: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Solve the normal equations of the ``chosen`` columns by Cholesky factorization. ``gram`` is
    the lower triangle, with a diagonal of 1. None if the columns are linearly dependent."""
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
    """The dot product over the length of the shorter operand."""
    return sum([x * y for x, y in zip(a, b, strict=False)])
