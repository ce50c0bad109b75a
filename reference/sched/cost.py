"""Predict the time of a step from earlier steps, and the number of tokens that fit a given time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from contract.lazy_dataclass import dataclass
from reference.sched.least_squares import nonnegative
from reference.sched.step_time_curve import StepTimeCurve

CELLS_MAX = 64
"""The most kinds of steps that are remembered; the kind seen longest ago is forgotten first."""
MEMORY_STEPS = 32
"""Over how many steps of one kind durations are averaged."""
REFIT_STEPS = 16
"""Steps after which the coefficients are fitted again. Before so many steps they are too uncertain
for the step-time curve to be measured against them."""
AGING_STEPS = 128
"""A kind not seen for so many steps has half its weight in the fit, after n times as many
1 / (n + 1): enough where there is no newer kind, little where there is."""
OUTLIER_FACTOR = 4.0
"""A step that is slower or faster than its kind by more than this factor counts as this factor."""

CHOICES = (*range(1, 256), *(int(2 ** (sixteenths / 16)) for sixteenths in range(128, 384)))
"""Numbers of tokens that may be added to a step: each up to 255, then sixteen in an octave."""


class Load(NamedTuple):
    """The work of a step: query ``tokens``, and the sum of the positions that each of them
    attends to."""

    tokens: int
    attended: int


@dataclass(slots=True)
class _Cell:
    """Means over recent steps of one kind; ``latest`` is the number of the last one."""

    tokens: float
    attended: float
    seconds: float
    seen: int = 1
    latest: int = 0

    def add(self, load: Load, seconds: float) -> None:
        low, high = self.seconds / OUTLIER_FACTOR, self.seconds * OUTLIER_FACTOR
        self.seen = min(self.seen + 1, MEMORY_STEPS)
        self.tokens += (load.tokens - self.tokens) / self.seen
        self.attended += (load.attended - self.attended) / self.seen
        self.seconds += (min(max(seconds, low), high) - self.seconds) / self.seen


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Fixed seconds of a step, seconds for a token, and seconds for a position attended to."""

    fixed: float
    token: float
    position: float


class StepCost:
    """Seconds of a step: a curve of its tokens (``StepTimeCurve``), plus a constant for each
    position attended to.

    The curve lies about a straight line, ``fixed + token * tokens``. The line and the seconds for a
    position are fitted by least squares of relative errors; no coefficient is below 0. Steps are
    averaged by kind first (the powers of two that their tokens and attended positions lie between),
    so that a long run of equal steps does not outweigh all others. Recent kinds have more weight.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._curve = StepTimeCurve()
        self._coefficients: Coefficients | None = None
        self._steps = 0
        self._fitted = 0
        self.total = 0.0
        """Seconds of all steps that were observed."""

    def observe(self, load: Load, seconds: float) -> None:
        """Learn that a step took ``seconds``. A duration that is not above 0 is ignored."""
        if not 0 < seconds < math.inf:
            return
        self.total += seconds
        line = self.coefficients()
        if line is not None and self._steps >= REFIT_STEPS:
            self._curve.observe(load.tokens, seconds - line.position * load.attended)
        kind = (load.tokens.bit_length(), load.attended.bit_length())
        cell = self._cells.pop(kind, None)
        if cell is None:
            cell = _Cell(*load, seconds)
            self._coefficients = None
        else:
            cell.add(load, seconds)
        self._cells[kind] = cell
        self._steps += 1
        cell.latest = self._steps
        if len(self._cells) > CELLS_MAX:
            del self._cells[next(iter(self._cells))]
        if self._steps - self._fitted >= REFIT_STEPS:
            self._coefficients = None

    def coefficients(self) -> Coefficients | None:
        """The straight line; None before steps of two sizes were seen."""
        if self._coefficients is None and len({tokens for tokens, _ in self._cells}) > 1:
            line = _fit(self._cells.values(), self._steps)
            self._coefficients, self._fitted = line, self._steps
            self._curve.set_line(line.fixed, line.token)
        return self._coefficients

    def predict(self, load: Load) -> float | None:
        """Expected seconds of a step; None before steps of two sizes were seen."""
        line = self.coefficients()
        if line is None:
            return None
        return self._curve.predict(load.tokens) + line.position * load.attended

    def tokens_within(self, seconds: float, load: Load, most: int, *, start: int = 0) -> int:
        """How many tokens, one of CHOICES, 0 or ``most``, can be added to a step of ``load`` so
        that it takes at most ``seconds``. They continue a sequence of ``start`` computed tokens.
        Raises ValueError before steps of two sizes were seen."""
        line = self.coefficients()
        if line is None:
            raise ValueError("steps of two sizes were not seen yet")
        position, tokens, attended = line.position, load.tokens, load.attended

        def too_long(more: int) -> bool:
            # n tokens attend to n * start + n (n + 1) / 2 positions.
            reached = attended + more * (start + (more + 1) / 2)
            return self._curve.predict_cautiously(tokens + more) + position * reached > seconds

        if not too_long(most):
            return most
        fitting = bisect_left(CHOICES, True, hi=bisect_left(CHOICES, most), key=too_long)
        return CHOICES[fitting - 1] if fitting else 0


def _fit(cells: Iterable[_Cell], steps: int) -> Coefficients:
    """The coefficients >= 0 with the least sum of squared relative errors, weighted by the age of
    each kind."""
    equations = []
    for cell in cells:
        weight = 1 / (1 + (steps - cell.latest) / AGING_STEPS)
        part = weight / cell.seconds
        equations.append((part, part * cell.tokens, part * cell.attended, weight))
    return Coefficients(*nonnegative(equations))
