"""Histograms that cost a step and a token little: two of them observe every step."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

AT_ONCE = 256
"""How many values are counted together."""


class Histogram(Collector):
    """How many values were at most each of ``bounds``, which rise; and their sum."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = [*bounds, float("inf")]
        self._lock = threading.Lock()
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._pending: deque[float] = deque()

    def observe(self, *values: float) -> None:
        """Count values, many of them at a time: not in every step."""
        self._pending.extend(values)
        if len(self._pending) >= AT_ONCE:
            self._count()

    def collect(self) -> Iterable[Metric]:
        self._count()
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, counts, strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=total)

    def _count(self) -> None:
        with self._lock:
            while self._pending:
                value = self._pending.popleft()
                self._counts[bisect_left(self._bounds, value)] += 1
                self._sum += value
