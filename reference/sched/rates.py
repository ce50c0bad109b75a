"""Counts over the last seconds, for quotas of tokens a second."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 5
"""The window over which a rate is averaged."""
BUCKETS_PER_SECOND = 16
"""A window has a bucket for each 1/16 s. A power of two, so that the bucket of a time is exact."""
_BUCKETS = WINDOW_SECONDS * BUCKETS_PER_SECOND + 1


class RateWindow:
    """A count over the last WINDOW_SECONDS, in bounded memory.

    Counts are stored for each 1/16 s that has any. The total covers at least the window and at most
    one bucket more, so it is never less than the true count: 5 s of steady work is overstated by at
    most 1/80."""

    __slots__ = ("_counts", "_latest", "_total")

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()
        self._latest = 0
        self._total = 0

    def add(self, now: float, count: int) -> None:
        """Count ``count`` at ``now`` seconds."""
        if not count:
            return
        self._advance(now)
        counts, latest = self._counts, self._latest
        if counts and counts[-1][0] == latest:
            counts[-1] = latest, counts[-1][1] + count
        else:
            counts.append((latest, count))
        self._total += count

    def total(self, now: float) -> int:
        """The count in the window that ends at ``now`` seconds."""
        self._advance(now)
        return self._total

    def per_second(self, now: float) -> float:
        """The total divided by the length of the window."""
        self._advance(now)
        return self._total / WINDOW_SECONDS

    def below_in(self, now: float, per_second: float) -> float:
        """Seconds from ``now`` until the counts fall below a rate; 0 if they already have."""
        left, gone_at = self.total(now), now
        for bucket, count in self._counts:
            if left / WINDOW_SECONDS < per_second:
                break
            left -= count
            gone_at = (bucket + _BUCKETS) / BUCKETS_PER_SECOND
        return max(0.0, gone_at - now)

    def recount(self) -> None:
        """Compute the total from the buckets again, after an interrupted call."""
        self._total = sum([count for _, count in self._counts])

    def _advance(self, now: float) -> None:
        """Drop the buckets that left the window. A clock that goes backwards stands still."""
        bucket = int(now * BUCKETS_PER_SECOND)
        if bucket > self._latest:
            self._latest = bucket
            counts, gone = self._counts, bucket - _BUCKETS
            while counts and counts[0][0] <= gone:
                self._total -= counts.popleft()[1]
