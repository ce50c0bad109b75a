"""How long steps take, and how long a step may take before its device is taken to hang."""

from __future__ import annotations

import math

LEAST_SECONDS = 60.0
"""How long a step may always take."""
OTHER_SECONDS = 600.0
"""How long a step of a size that was not seen yet may always take, and work between steps, which
may load weights."""
LONGER = 10.0
"""A step may take this many times as long as the longest recent one of its size."""
FADING = 0.98
"""What a longest time is multiplied by at each further step: kernels were compiled in that step, or
the process was stopped, and the device may hang all the same."""
FIRST_TOKEN_SECONDS = 0.5
"""Seconds that a token is expected to take before any step."""


class StepTimes:
    """How long steps took: the longest recent one of each size, which is a number of tokens up to a
    power of two, and the least seconds of a token."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}
        self._pace = math.inf

    def note(self, seconds: float, tokens: int) -> None:
        """A step of ``tokens`` took ``seconds``."""
        if tokens:
            size = tokens.bit_length()
            self._longest[size] = max(seconds, FADING * self._longest.get(size, 0.0))
            self._pace = min(self._pace, seconds / tokens)

    def patience(self, tokens: int) -> float:
        """The seconds after which a step of ``tokens`` is taken to hang."""
        longest = self._longest.get(tokens.bit_length())
        if longest is not None:
            return max(LEAST_SECONDS, LONGER * longest)
        pace = FIRST_TOKEN_SECONDS if self._pace == math.inf else self._pace
        return max(OTHER_SECONDS, LONGER * pace * tokens)
