"""The counters of usage have what was counted, and its percentiles are as exact as they say."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.types import FinishReason
from reference.usage import CELLS_PER_OCTAVE, Histogram, UsageCounters

ERROR = 1 / (2 * CELLS_PER_OCTAVE)
DURATIONS = st.lists(st.tuples(st.floats(1e-6, 1e6), st.integers(1, 50)), min_size=1, max_size=60)


def nearest_rank(durations: list[tuple[float, int]], part: float) -> float:
    """The percentile by its definition, from everything that was added."""
    every = sorted(seconds for seconds, count in durations for _ in range(count))
    return every[max(1, math.ceil(part * len(every))) - 1]


def filled(durations: list[tuple[float, int]]) -> Histogram:
    histogram = Histogram()
    for seconds, count in durations:
        histogram.add(seconds, count)
    return histogram


@given(DURATIONS, st.sampled_from((0.0, 0.01, 0.5, 0.99, 1.0)) | st.floats(0, 1))
def test_a_percentile_is_within_the_stated_error(durations, part):
    exact = nearest_rank(durations, part)
    assert filled(durations).percentile(part) == pytest.approx(exact, rel=ERROR, abs=0)


def test_the_stated_error_is_no_smaller_than_it_must_be():
    """Negative control: half the stated error would be missed."""
    seconds = 1.0
    found = filled([(seconds, 1)]).percentile(0.5)
    assert found is not None
    assert ERROR / 2 < found - seconds <= ERROR


def test_a_histogram_stays_small():
    histogram = Histogram()
    seconds = 1e-9
    while seconds < 1e9:
        histogram.add(seconds)
        seconds *= 1.003
    assert len(histogram._cells) <= 40 * CELLS_PER_OCTAVE
    assert histogram.total == sum(histogram._cells.values())


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [(0.0, 0, 2e-6), (-1.0, 0, 2e-6), (5e-324, 0, 2e-6), (1e9, 2.0**19, 2.0**20)],
)
def test_durations_out_of_range_count_as_the_nearest(seconds, least, most):
    found = filled([(seconds, 1)]).percentile(0.5)
    assert found is not None
    assert least <= found <= most


def test_without_durations_there_is_no_percentile():
    assert Histogram().percentile(0.5) is None


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(("rejected", "admitted", "preempted", "prompted", "generated", "finished")),
        st.integers(1, 100),
    ),
    max_size=60,
)


@given(EVENTS)
def test_counters_are_the_sums_of_what_was_told(events):
    usage = UsageCounters()
    sums: Counter[tuple[int, str]] = Counter()
    for tenant, kind, amount in events:
        if kind in ("prompted", "generated"):
            entry = usage.entry(tenant)
            entry.prompted += amount * (kind == "prompted")
            entry.generated += amount * (kind == "generated")
            sums[tenant, kind] += amount
        elif kind == "finished":
            usage.finished(tenant, FinishReason.STOP)
            sums[tenant, kind] += 1
        else:
            getattr(usage, kind)(tenant)
            sums[tenant, kind] += 1
    for tenant in range(3):
        entry = usage.of(tenant)
        assert entry.requests_rejected == sums[tenant, "rejected"]
        assert entry.slots_admitted == sums[tenant, "admitted"]
        assert entry.slots_preempted == sums[tenant, "preempted"]
        assert entry.tokens_prompted == sums[tenant, "prompted"]
        assert entry.tokens_generated == sums[tenant, "generated"]
        assert sum(entry.requests_finished.values()) == sums[tenant, "finished"]


def test_an_entry_shows_times_in_milliseconds():
    usage = UsageCounters()
    for _ in range(99):
        usage.first_token(4, 0.1)
    usage.first_token(4, 3.0)
    usage.interval(4, 0.02, count=98)
    usage.interval(4, 0.5, count=2)
    entry = usage.of(4)
    assert entry.p50_ttft_ms == pytest.approx(100, rel=ERROR)
    assert entry.p99_ttft_ms == pytest.approx(100, rel=ERROR)
    assert entry.p50_decode_ms == pytest.approx(20, rel=ERROR)
    assert entry.p99_decode_ms == pytest.approx(500, rel=ERROR)
    assert entry.tokens_generated == 0


def test_the_hit_rate_follows_the_latest_requests():
    usage = UsageCounters()
    assert usage.of(1).prefix_hit_rate == 0
    usage.looked_up(1, asked=100, hit=25)
    assert usage.of(1).prefix_hit_rate == 0.25
    for _ in range(300):
        usage.looked_up(1, asked=100, hit=90)
    assert usage.of(1).prefix_hit_rate == pytest.approx(0.9, rel=0.02)
    usage.looked_up(2, asked=0, hit=0)
    assert usage.of(2).prefix_hit_rate == 0


def test_the_most_pages_held_are_remembered():
    usage = UsageCounters()
    for pages in (3, 9, 2):
        usage.holds(1, pages)
    assert usage.of(1).kv_pages_peak == 9


def test_a_forgotten_tenant_begins_anew_and_others_stay():
    usage = UsageCounters()
    usage.generated(1, 5)
    usage.generated(2, 7)
    usage.forget(1)
    usage.forget(99)
    assert usage.of(1) == UsageCounters().of(1)
    assert usage.of(2).tokens_generated == 7
