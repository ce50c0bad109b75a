"""Counters of the usage of each tenant, and percentiles of its waits in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import field

from contract.lazy_dataclass import dataclass
from contract.types import FinishReason

CELLS_PER_OCTAVE = 32
"""Cells between a duration and twice that."""
OCTAVE_MIN, OCTAVE_MAX = -19, 20
"""Durations are kept from 2^-20 s (1 us) to 2^20 s (12 days); others count as the nearest."""
LOOKUP_MEMORY = 64
"""Requests over which the prefix hit rate is averaged: older ones fade by 1 - 1/64 each."""


class Histogram:
    """Durations in seconds, counted in cells that divide each octave evenly.

    At most 1,280 counts, whatever is added. A percentile is the middle of the cell that holds the
    exact one (nearest rank): at most 1/64 of it away."""

    __slots__ = ("_cells", "total")

    def __init__(self) -> None:
        self._cells: Counter[int] = Counter()
        self.total = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count ``count`` durations of ``seconds``."""
        mantissa, octave = math.frexp(seconds)
        cell = int((mantissa - 0.5) * 2 * CELLS_PER_OCTAVE)
        if octave < OCTAVE_MIN or seconds <= 0:
            octave, cell = OCTAVE_MIN, 0
        elif octave > OCTAVE_MAX:
            octave, cell = OCTAVE_MAX, CELLS_PER_OCTAVE - 1
        self._cells[octave * CELLS_PER_OCTAVE + cell] += count
        self.total += count

    def percentile(self, part: float) -> float | None:
        """The least duration that ``part`` (0 to 1) of all are not above; None without any."""
        rank = max(1, math.ceil(part * self.total))
        for key in sorted(self._cells):
            rank -= self._cells[key]
            if rank <= 0:
                octave, cell = divmod(key, CELLS_PER_OCTAVE)
                return math.ldexp(0.5 + (cell + 0.5) / (2 * CELLS_PER_OCTAVE), octave)
        return None


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """The usage of a tenant so far. Times are in milliseconds, None before the first one;
    ``prefix_hit_rate`` is a moving average over requests, by tokens, 0 before the first one."""

    requests_finished: dict[FinishReason, int]
    requests_rejected: int
    tokens_prompted: int
    tokens_generated: int
    slots_admitted: int
    slots_preempted: int
    kv_pages_peak: int
    prefix_hit_rate: float
    p50_ttft_ms: float | None
    p99_ttft_ms: float | None
    p50_decode_ms: float | None
    p99_decode_ms: float | None


@dataclass(slots=True)
class TenantCounters:
    """The counters of one tenant."""

    finished: Counter[FinishReason] = field(default_factory=Counter)
    rejected: int = 0
    prompted: int = 0
    generated: int = 0
    admitted: int = 0
    preempted: int = 0
    pages_peak: int = 0
    asked: float = 0.0
    hit: float = 0.0
    first: Histogram = field(default_factory=Histogram)
    intervals: Histogram = field(default_factory=Histogram)


class UsageCounters:
    """One entry for each tenant that ever did anything, until it is forgotten. Every call takes
    constant time but ``of``, which sorts the cells of the histograms."""

    def __init__(self) -> None:
        self._entries: dict[int, TenantCounters] = {}

    def rejected(self, tenant: int) -> None:
        """A request was refused: a quota, a full queue or a bad parameter."""
        self.entry(tenant).rejected += 1

    def admitted(self, tenant: int) -> None:
        """A request was given a slot, for the first time or again."""
        self.entry(tenant).admitted += 1

    def preempted(self, tenant: int) -> None:
        """A request lost its slot to another."""
        self.entry(tenant).preempted += 1

    def looked_up(self, tenant: int, asked: int, hit: int) -> None:
        """Count ``asked`` tokens looked up in the prefix cache, of which ``hit`` were found."""
        entry = self.entry(tenant)
        fade = 1 - 1 / LOOKUP_MEMORY
        entry.asked = entry.asked * fade + asked
        entry.hit = entry.hit * fade + hit

    def holds(self, tenant: int, pages: int) -> None:
        """Note that the tenant holds ``pages`` pages now."""
        entry = self.entry(tenant)
        entry.pages_peak = max(entry.pages_peak, pages)

    def first_token(self, tenant: int, seconds: float) -> None:
        """A request's first token came ``seconds`` after it was submitted. Counts no token."""
        self.entry(tenant).first.add(seconds)

    def interval(self, tenant: int, seconds: float, count: int = 1) -> None:
        """``count`` tokens came ``seconds`` after those before them. Counts no token."""
        self.entry(tenant).intervals.add(seconds, count)

    def generated(self, tenant: int, tokens: int = 1) -> None:
        """So many tokens were handed out."""
        self.entry(tenant).generated += tokens

    def finished(self, tenant: int, reason: FinishReason, requests: int = 1) -> None:
        """So many requests ended."""
        self.entry(tenant).finished[reason] += requests

    def handed_out(self, tenant: int) -> tuple[int, Counter[FinishReason]]:
        """Tokens handed out to the tenant, and how many requests ended for which reason."""
        entry = self.entry(tenant)
        return entry.generated, Counter(entry.finished)

    @property
    def tenants(self) -> tuple[int, ...]:
        """Those who have an entry."""
        return tuple(self._entries)

    def of(self, tenant: int) -> TenantStatistics:
        """The usage of the tenant so far, all zeros for one that sent no request."""
        entry = self._entries.get(tenant, TenantCounters())
        return TenantStatistics(
            requests_finished=dict(entry.finished),
            requests_rejected=entry.rejected,
            tokens_prompted=entry.prompted,
            tokens_generated=entry.generated,
            slots_admitted=entry.admitted,
            slots_preempted=entry.preempted,
            kv_pages_peak=entry.pages_peak,
            prefix_hit_rate=entry.hit / entry.asked if entry.asked else 0.0,
            p50_ttft_ms=_milliseconds(entry.first, 0.50),
            p99_ttft_ms=_milliseconds(entry.first, 0.99),
            p50_decode_ms=_milliseconds(entry.intervals, 0.50),
            p99_decode_ms=_milliseconds(entry.intervals, 0.99),
        )

    def forget(self, tenant: int) -> None:
        """Drop the entry of a tenant, if there is one."""
        self._entries.pop(tenant, None)

    def take_back(self, entry: TenantCounters, tokens: int) -> None:
        """Subtract ``tokens`` that were delivered to the tenant of ``entry`` after the end of their
        answer, such as a stop string, which the engine does not know. If the tenant was removed, a
        new one with its id loses nothing."""
        entry.generated -= tokens

    def entry(self, tenant: int) -> TenantCounters:
        """The counters of a tenant, until it is forgotten."""
        entry = self._entries.get(tenant)
        if entry is None:
            entry = self._entries[tenant] = TenantCounters()
        return entry


def _milliseconds(histogram: Histogram, part: float) -> float | None:
    seconds = histogram.percentile(part)
    return None if seconds is None else seconds * 1000
