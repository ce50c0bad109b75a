"""Seconds of plain steps, those without drafts, by the length of their sequences: attention reads
all positions before a token, so a step behind thousands of tokens takes longer."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import field

from contract.lazy_dataclass import dataclass

MEASUREMENTS_MIN = 3
"""The steps whose median counts as measured; three times as many are kept."""
SHORT_TOKENS = 256
"""Below this length steps count as equally long. Each power of two from it on is measured by
itself."""


@dataclass(slots=True)
class MedianTime:
    """The lower median of the latest durations, in ``seconds``, and the ``length`` of the sequences
    of that step, in tokens."""

    latest: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=3 * MEASUREMENTS_MIN)
    )
    seconds: float = 0.0
    length: float = 0.0

    def add(self, seconds: float, length: float) -> None:
        self.latest.append((seconds, length))
        self.seconds, self.length = sorted(self.latest)[(len(self.latest) - 1) // 2]


class PlainTimes:
    """The median time of plain steps of one number of sequences, by their mean length in tokens."""

    def __init__(self) -> None:
        self._medians: dict[int, MedianTime] = {}
        self._lengths: list[float] = []
        self._seconds: list[float] = []
        self._least = 0

    def add(self, seconds: float, length: float) -> None:
        """Record a step that took ``seconds``."""
        self._medians.setdefault(_kind(length), MedianTime()).add(seconds, length)
        measured = [
            (median.length, median.seconds, kind)
            for kind, median in self._medians.items()
            if len(median.latest) >= MEASUREMENTS_MIN
        ]
        measured.sort()
        self._lengths = [length for length, _, _ in measured]
        self._seconds = [seconds for _, seconds, _ in measured]
        self._least = measured[0][2] if measured else 0

    def measured(self, length: float) -> bool:
        """Whether steps as short as this were measured. Longer ones take at least as long as the
        longest that were."""
        return bool(self._lengths) and _kind(length) >= self._least

    def at(self, length: float) -> float:
        """Seconds of a step, between those of the nearest measured lengths. Some must be
        measured."""
        lengths, seconds = self._lengths, self._seconds
        above = bisect_right(lengths, length)
        if not 0 < above < len(lengths):
            return seconds[max(0, above - 1)]
        part = (length - lengths[above - 1]) / (lengths[above] - lengths[above - 1])
        return seconds[above - 1] + part * (seconds[above] - seconds[above - 1])


def _kind(length: float) -> int:
    return max(SHORT_TOKENS - 1, int(length)).bit_length()
