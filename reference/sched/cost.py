"""What a step will take, learned from the steps before, and how much prefill a step may carry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

CELLS_MAX = 64
"""Kinds of steps remembered; the one not seen for longest goes first."""
MEMORY_STEPS = 32
"""Steps of one kind over which their times are averaged."""
REFIT_STEPS = 16
"""Steps after which the coefficients are computed anew."""
AGING_STEPS = 128
"""A kind not seen for so many steps counts half as much in the fit, for n times as many
1 / (n + 1): enough where nothing newer tells, little where it does."""
OUTLIER_FACTOR = 4.0
"""A step this much slower or faster than others of its kind counts as only so much."""
FIRST_PREFILL_TOKENS = 64
"""Prefill beside decoding sequences while costs are not known yet."""


@dataclass(slots=True)
class _Cell:
    """Means over recent steps of one kind; ``latest`` numbers the last of them."""

    tokens: float
    attended: float
    seconds: float
    seen: int = 1
    latest: int = 0

    def add(self, tokens: int, attended: int, seconds: float) -> None:
        low, high = self.seconds / OUTLIER_FACTOR, self.seconds * OUTLIER_FACTOR
        self.seen = min(self.seen + 1, MEMORY_STEPS)
        self.tokens += (tokens - self.tokens) / self.seen
        self.attended += (attended - self.attended) / self.seen
        self.seconds += (min(max(seconds, low), high) - self.seconds) / self.seen


class StepCost:
    """Seconds of a step: ``fixed + per_token * tokens + per_position * attended``.

    ``attended`` is the sum, over the step's query tokens, of the positions each attends to. Steps
    are averaged by kind (the powers of two their tokens and attended positions lie between), so
    that a long run of equal steps does not make the others forgotten. The coefficients are the
    least squares of the kinds' relative errors, recent kinds counting more; none is below 0.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._coefficients: NDArray[np.float64] | None = None
        self._steps = 0
        self._fitted = 0

    def observe(self, tokens: int, attended: int, seconds: float) -> None:
        """Learn that a step took ``seconds``. A duration that is not above 0 teaches nothing."""
        if not 0 < seconds < math.inf:
            return
        kind = (tokens.bit_length(), attended.bit_length())
        cell = self._cells.pop(kind, None)
        if cell is None:
            cell = _Cell(tokens, attended, seconds)
            self._coefficients = None
        else:
            cell.add(tokens, attended, seconds)
        self._cells[kind] = cell
        self._steps += 1
        cell.latest = self._steps
        if len(self._cells) > CELLS_MAX:
            del self._cells[next(iter(self._cells))]
        if self._steps - self._fitted >= REFIT_STEPS:
            self._coefficients = None

    def coefficients(self) -> tuple[float, float, float] | None:
        """(fixed, per_token, per_position) in seconds; None before steps of two sizes were seen."""
        if len({tokens for tokens, _ in self._cells}) < 2:
            return None
        if self._coefficients is None:
            self._coefficients = _fit(list(self._cells.values()), self._steps)
            self._fitted = self._steps
        fixed, per_token, per_position = self._coefficients.tolist()
        return fixed, per_token, per_position

    def predict(self, tokens: int, attended: int) -> float | None:
        """Seconds a step would take; None before steps of two sizes were seen."""
        coefficients = self.coefficients()
        if coefficients is None:
            return None
        fixed, per_token, per_position = coefficients
        return fixed + per_token * tokens + per_position * attended

    def prefill_budget(
        self, decoding: int, attended: int, ratio: float, most: int, *, start: int = 0
    ) -> int:
        """Prefill tokens, 1 to ``most``, of a step whose ``decoding`` sequences attend to
        ``attended`` positions, so that it takes at most ``ratio`` times as long as without prefill.

        The prefill continues a sequence of ``start`` computed tokens. One token is always given, so
        that prefill goes on; without a decoding sequence nobody waits, and it is ``most``.
        """
        if not decoding:
            return most
        alone = self.predict(decoding, attended)
        coefficients = self.coefficients()
        if alone is None or coefficients is None:
            return min(most, FIRST_PREFILL_TOKENS)
        _, per_token, per_position = coefficients
        # n tokens attend to n * start + n (n + 1) / 2 positions: a quadratic in n.
        square = per_position / 2
        linear = per_token + per_position * (start + 0.5)
        spare = max(0.0, (ratio - 1) * alone)
        root = linear + math.sqrt(linear * linear + 4 * square * spare)
        if 2 * spare >= root * most:
            return most
        return max(1, int(2 * spare / root))


def _fit(cells: list[_Cell], steps: int) -> NDArray[np.float64]:
    """float64[3]: the coefficients >= 0 with the least sum of squared relative errors, each
    divided by the age of its kind.

    With three coefficients, the best set of those that are not 0 is found by trying all seven, all
    three first: where none of these is negative no fewer are better.
    """
    seconds = np.array([cell.seconds for cell in cells])
    weight = 1 / (1 + np.array([steps - cell.latest for cell in cells]) / AGING_STEPS)
    terms = np.array([(1.0, cell.tokens, cell.attended) for cell in cells])
    terms *= (weight / seconds)[:, None]
    scale = np.sqrt((terms * terms).sum(0))
    scale[scale == 0] = 1.0
    terms /= scale
    best: NDArray[np.float64] = np.zeros(3)
    least = math.inf
    for size in (3, 2, 1):
        for chosen in map(list, combinations(range(3), size)):
            found = np.linalg.lstsq(terms[:, chosen], weight)[0]
            error = float(((terms[:, chosen] @ found - weight) ** 2).sum())
            if (found >= 0).all() and error < least:
                best = np.zeros(3)
                best[chosen] = found / scale[chosen]
                least = error
        if size == 3 and least < math.inf:
            break
    return best
