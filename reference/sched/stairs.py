"""What steps of each number of tokens take beside the straight line through all of them.

Products take tokens in tiles, and a form of a step its own kernels: 33 tokens can cost a third more
than 32, and 17 what 24 cost. What is learned is kept as factors of the line, so that it stays of
use when the machine as a whole becomes slower or faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SINGLE_TOKENS = 64
"""Up to so many tokens each number is a stair of its own; larger ones share one by their four
leading bits."""
MEMORY_STEPS = 16
"""Steps of one stair over which its factor is averaged."""
AGING_STEPS = 128
"""A stair nobody stood on for so many steps counts half beside those next to it."""
FARTHEST = 2.0
"""The most a step is believed to lie off the line, either way: more is a hiccup."""
SURPRISE = 1.1
"""How much longer than expected the first step of a stair may take, or those nobody stood on yet
count as the next higher one for CAREFUL_STEPS: finding a high one costs a long step."""
CAREFUL_STEPS = 512
FREE_STEPS = 128
"""The first steps of all, among which any stair may be tried."""
CHANGED = 0.005
"""By how much of itself a factor must change before the curve is computed anew."""


@dataclass(slots=True)
class _Stair:
    tokens: float
    factor: float
    seen: int = 0
    latest: int = 0

    def add(self, tokens: int, factor: float) -> None:
        self.seen = min(self.seen + 1, MEMORY_STEPS)
        self.tokens += (tokens - self.tokens) / self.seen
        self.factor += (factor - self.factor) / self.seen


class _Curves(NamedTuple):
    """Seconds by tokens, float64: ``through`` the stairs that were seen, straight between them, and
    ``above``, those between two stairs as the higher one."""

    through: NDArray[np.float64]
    above: NDArray[np.float64]


@dataclass(slots=True)
class Stairs:
    """Seconds by number of tokens, as a curve that never falls: through the stairs that were seen,
    and beyond them as the line goes.

    Where a stair that was seen long ago is higher than a later one, both get their weighted mean
    (isotonic regression: Barlow et al., 1972).
    """

    _seen: dict[int, _Stair] = field(default_factory=dict)
    _steps: int = 0
    _careful_until: int = 0
    _line: tuple[float, float] = (0.0, 0.0)
    _curves: _Curves | None = None
    _most: int = 0

    def follow(self, fixed: float, token: float) -> None:
        """The line is ``fixed + token * tokens`` from now on."""
        self._line = fixed, token
        self._curves = None

    def observe(self, tokens: int, seconds: float) -> None:
        """A step took ``seconds``, what its attention took not counted."""
        fixed, token = self._line
        line = fixed + token * tokens
        if line <= 0:
            return
        self._steps += 1
        factor = min(max(seconds / line, 1 / FARTHEST), FARTHEST)
        number = tokens - tokens % _width(tokens)
        stair = self._seen.get(number)
        if stair is None:
            if seconds > SURPRISE * self.at(tokens) and self._steps > FREE_STEPS:
                self._careful_until = self._steps + CAREFUL_STEPS
            stair = self._seen[number] = _Stair(tokens, factor)
            self._curves = None
        before = stair.factor
        stair.add(tokens, factor)
        stair.latest = self._steps
        if abs(stair.factor - before) > CHANGED * before:
            self._curves = None

    def at(self, tokens: int) -> float:
        """Seconds of a step."""
        return float(self._up_to(tokens).through[tokens])

    def between(self, first: int, last: int) -> NDArray[np.float64]:
        """float64[last - first + 1]: seconds of steps of ``first`` to ``last`` tokens, for who may
        choose among them."""
        curves = self._up_to(last)
        careful = self._steps < self._careful_until
        return (curves.above if careful else curves.through)[first : last + 1]

    def _up_to(self, last: int) -> _Curves:
        if self._curves is None or last > self._most:
            self._most = max(last, self._most)
            self._curves = self._computed(np.arange(self._most + 1.0))
        return self._curves

    def _computed(self, counts: NDArray[np.float64]) -> _Curves:
        fixed, token = self._line
        line = fixed + token * counts
        if not self._seen or fixed + token <= 0:
            return _Curves(line, line)
        stairs = sorted(self._seen.values(), key=lambda stair: stair.tokens)
        tokens = np.array([stair.tokens for stair in stairs])
        factors = np.array([stair.factor for stair in stairs])
        ages = self._steps - np.array([stair.latest for stair in stairs])
        weights = np.array([stair.seen for stair in stairs]) / (1 + ages / AGING_STEPS)
        heights = np.array(_rising((factors * (fixed + token * tokens)).tolist(), weights.tolist()))
        through = np.interp(counts, tokens, heights)
        through += token * np.maximum(counts - tokens[-1], 0)
        through *= np.minimum(1.0, line / (fixed + token * tokens[0]))
        higher = np.searchsorted(tokens, counts)
        above = through.copy()
        within = higher < len(tokens)
        above[within] = heights[higher[within]]
        return _Curves(through, above)


def _rising(heights: list[float], weights: list[float]) -> list[float]:
    """The rising numbers nearest to ``heights`` by weighted squares: neighbours that fall are
    pooled."""
    pools: list[tuple[float, float, int]] = []
    for height, weight in zip(heights, weights, strict=True):
        count = 1
        while pools and pools[-1][0] >= height:
            before, beside, many = pools.pop()
            height = (height * weight + before * beside) / (weight + beside)
            weight, count = weight + beside, count + many
        pools.append((height, weight, count))
    return [height for height, _, count in pools for _ in range(count)]


def _width(tokens: int) -> int:
    """How many numbers of tokens share a stair."""
    return 1 << max(0, tokens.bit_length() - 4) if tokens > SINGLE_TOKENS else 1
