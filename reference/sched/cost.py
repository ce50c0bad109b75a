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
"""The number of kinds of steps remembered; the kind seen longest ago is forgotten first."""
MEMORY_STEPS = 32
"""The number of steps of a kind over which durations are averaged."""
REFIT_STEPS = 16
"""The number of steps between two fits of the coefficients. Before the first fit they are too
uncertain for the step-time curve to be measured against them."""
AGING_STEPS = 128
"""A kind not seen for this many steps has half its weight in the fit, for n times as many 1 / (n +
1): enough if there is no newer kind, little otherwise."""
OUTLIER_FACTOR = 4.0
"""A step that differs from the mean of its kind by more than this factor counts as if it differed
by this factor."""

CHOICES = (*range(1, 256), *(int(2 ** (sixteenths / 16)) for sixteenths in range(128, 384)))
"""Numbers of tokens that can be added to a step: each up to 255, then sixteen per octave."""


class Load(NamedTuple):
    """The work of a step: its query ``tokens``, and ``attended``, the sum over them of the
    positions they attend to."""

    tokens: int
    attended: int


@dataclass(slots=True)
class _Cell:
    """Means over recent steps of one kind; ``latest`` is the number of the last step."""

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
    """Seconds of a step without tokens, of each token, and of each attended position."""

    fixed: float
    token: float
    position: float


class StepCost:
    """Predicts the seconds of a step: a curve of its tokens (``StepTimeCurve``), plus a constant
    for each attended position.

    The curve is stored relative to a straight line, ``fixed + token * tokens``. The line and the
    seconds per position are fitted by least squares of relative errors; no coefficient is below 0.
    Steps are first averaged by kind: those whose tokens and attended positions lie between the same
    powers of two. So a long run of equal steps does not outweigh all others. Recent kinds weigh
    more."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._curve = StepTimeCurve()
        self._coefficients: Coefficients | None = None
        self._steps = 0
        self._fitted = 0
        self.total = 0.0
        """Seconds of all steps that were observed."""

    def observe(self, load: Load, seconds: float) -> None:
        """Record a step that took ``seconds``. A duration of 0 or less is ignored."""
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
        """The straight line; None until steps of two sizes were observed."""
        if self._coefficients is None and len({tokens for tokens, _ in self._cells}) > 1:
            line = _fit(self._cells.values(), self._steps)
            self._coefficients, self._fitted = line, self._steps
            self._curve.set_line(line.fixed, line.token)
        return self._coefficients

    def predict(self, load: Load) -> float | None:
        """Expected seconds of a step; None until steps of two sizes were observed."""
        line = self.coefficients()
        if line is None:
            return None
        return self._curve.predict(load.tokens) + line.position * load.attended

    def tokens_within(
        self, seconds: float, load: Load, limit: int, *, start: int = 0, cautious: bool = True
    ) -> int:
        """The most tokens, one of CHOICES, 0 or ``limit``, that can be added to a step of ``load``
        without exceeding ``seconds``. They continue a sequence of ``start`` computed tokens. If
        ``cautious``, sizes that may take longer than expected are not tried too often. Raises
        ValueError until steps of two sizes were observed."""
        line = self.coefficients()
        if line is None:
            raise ValueError("steps of two sizes were not seen yet")
        position, tokens, attended = line.position, load.tokens, load.attended
        predict = self._curve.predict_cautiously if cautious else self._curve.predict

        def too_long(more: int) -> bool:
            # n tokens attend to n * start + n (n + 1) / 2 positions.
            reached = attended + more * (start + (more + 1) / 2)
            return predict(tokens + more) + position * reached > seconds

        if not too_long(limit):
            return limit
        fitting = bisect_left(CHOICES, True, hi=bisect_left(CHOICES, limit), key=too_long)
        return CHOICES[fitting - 1] if fitting else 0


def _fit(cells: Iterable[_Cell], steps: int) -> Coefficients:
    """The coefficients >= 0 with the smallest sum of squared relative errors, weighted by the age
    of each kind."""
    equations = []
    for cell in cells:
        weight = 1 / (1 + (steps - cell.latest) / AGING_STEPS)
        part = weight / cell.seconds
        equations.append((part, part * cell.tokens, part * cell.attended, weight))
    return Coefficients(*nonnegative(equations))
