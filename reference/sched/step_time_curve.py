"""The measured time of a step by its number of tokens, relative to a straight line.

Kernels compute tokens in tiles, and each shape bucket has its own kernels: 33 tokens can cost a
third more than 32, and 17 as much as 24. Measurements are stored as factors of the line, so that
they stay useful if the machine as a whole becomes slower or faster."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import field
from typing import NamedTuple

from contract.lazy_dataclass import dataclass

EXACT_TOKENS_MAX = 64
"""Numbers of tokens up to this one are points of their own; larger numbers share a point by their
four leading bits."""
MEMORY_STEPS = 16
"""The number of steps over which the factor of a point is averaged."""
AGING_STEPS = 128
"""A point not seen for this many steps has half its weight against its neighbours."""
FACTOR_MAX = 2.0
"""The largest factor between a step and the line, either way; a larger one is clipped as a
disturbance."""
SURPRISE_FACTOR = 1.1
"""If the first step of a point takes longer than expected by this factor, sizes not seen yet are
predicted as the next larger point for CAREFUL_STEPS, since each try of such a size costs a long
step."""
CAREFUL_STEPS = 512
FREE_STEPS = 128
"""Any size may be tried in the first steps, up to this number."""
REFIT_CHANGE = 0.005
"""The curve is computed again if a factor has changed by more than this part of itself."""


@dataclass(slots=True)
class _CurvePoint:
    tokens: float
    factor: float
    seen: int = 0
    latest: int = 0

    def add(self, tokens: int, factor: float) -> None:
        self.seen = min(self.seen + 1, MEMORY_STEPS)
        self.tokens += (tokens - self.tokens) / self.seen
        self.factor += (factor - self.factor) / self.seen


class _CurvePoints(NamedTuple):
    """The points in order of tokens."""

    tokens: list[float]
    seconds: list[float]


@dataclass(slots=True)
class StepTimeCurve:
    """Seconds of a step as a non-decreasing curve of its tokens: through the points seen, and
    parallel to the line beyond the last.

    If a point is higher than the next one, both get their weighted mean (isotonic regression:
    Barlow et al., 1972)."""

    _seen: dict[int, _CurvePoint] = field(default_factory=dict)
    _steps: int = 0
    _careful_until: int = 0
    _line: tuple[float, float] = (0.0, 0.0)
    _fitted: _CurvePoints | None = None

    def set_line(self, fixed: float, token: float) -> None:
        """Set the line to ``fixed + token * tokens``."""
        self._line = fixed, token
        self._fitted = None

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a step that took ``seconds``, not counting its attention."""
        fixed, token = self._line
        line = fixed + token * tokens
        if line <= 0:
            return
        self._steps += 1
        factor = min(max(seconds / line, 1 / FACTOR_MAX), FACTOR_MAX)
        number = tokens - tokens % _width(tokens)
        point = self._seen.get(number)
        if point is None:
            if seconds > SURPRISE_FACTOR * self.predict(tokens) and self._steps > FREE_STEPS:
                self._careful_until = self._steps + CAREFUL_STEPS
            point = self._seen[number] = _CurvePoint(tokens, factor)
            self._fitted = None
        before = point.factor
        point.add(tokens, factor)
        point.latest = self._steps
        if abs(point.factor - before) > REFIT_CHANGE * before:
            self._fitted = None

    def predict(self, tokens: int) -> float:
        """Expected seconds of a step."""
        fixed, token = self._line
        line = fixed + token * tokens
        if not self._seen or fixed + token <= 0:
            return line
        curve = self._curve()
        first, last = curve.tokens[0], curve.tokens[-1]
        seconds = _between(curve, bisect_right(curve.tokens, tokens), tokens)
        seconds += token * max(tokens - last, 0)
        return seconds * min(1.0, line / (fixed + token * first))

    def predict_cautiously(self, tokens: int) -> float:
        """Expected seconds of a step, more for sizes that should not be tried now."""
        if self._steps < self._careful_until and self._seen:
            curve = self._curve()
            higher = bisect_left(curve.tokens, tokens)
            if higher < len(curve.tokens):
                return curve.seconds[higher]
        return self.predict(tokens)

    def _curve(self) -> _CurvePoints:
        if self._fitted is None:
            fixed, token = self._line
            curve = sorted(self._seen.values(), key=lambda point: point.tokens)
            heights = [point.factor * (fixed + token * point.tokens) for point in curve]
            weights = [
                point.seen / (1 + (self._steps - point.latest) / AGING_STEPS) for point in curve
            ]
            tokens = [point.tokens for point in curve]
            self._fitted = _CurvePoints(tokens, _isotonic(heights, weights))
        return self._fitted


def _between(curve: _CurvePoints, index: int, tokens: int) -> float:
    """The seconds of a step whose size lies before the point ``index`` of a curve."""
    if not 0 < index < len(curve.tokens):
        return curve.seconds[max(0, index - 1)]
    before, after = curve.tokens[index - 1], curve.tokens[index]
    lower, higher = curve.seconds[index - 1], curve.seconds[index]
    return (higher - lower) / (after - before) * (tokens - before) + lower


def _isotonic(heights: list[float], weights: list[float]) -> list[float]:
    """The non-decreasing numbers nearest to ``heights`` by weighted squares: decreasing neighbours
    are pooled."""
    pools: list[tuple[float, float, int]] = []
    for height, weight in zip(heights, weights, strict=True):
        count = 1
        while pools and pools[-1][0] >= height:
            before, other, many = pools.pop()
            height = (height * weight + before * other) / (weight + other)
            weight, count = weight + other, count + many
        pools.append((height, weight, count))
    return [height for height, _, count in pools for _ in range(count)]


def _width(tokens: int) -> int:
    """The number of token counts that share the point of ``tokens``."""
    return 1 << max(0, tokens.bit_length() - 4) if tokens > EXACT_TOKENS_MAX else 1
