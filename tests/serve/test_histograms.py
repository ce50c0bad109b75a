"""Histograms against those of Prometheus' own client."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Theirs

from harness.serve.metrics import Histogram

BOUNDS = (0.125, 0.5, 1, 2.5, 16)
VALUES = st.lists(st.sampled_from(BOUNDS) | st.integers(0, 80).map(lambda n: n / 4))


@given(st.lists(VALUES))
def test_they_tell_what_prometheus_own_would(batches):
    """Of values one by one and many at once, on the bounds too."""
    told = []
    ours, theirs = Histogram("one:seconds", "What.", BOUNDS), CollectorRegistry()
    other = Theirs("one:seconds", "What.", registry=theirs, buckets=BOUNDS)
    for batch in batches:
        ours.observe(*batch)
        for value in batch:
            other.observe(value)
    mine = CollectorRegistry(auto_describe=False)
    mine.register(ours)
    for registry in (mine, theirs):
        lines = generate_latest(registry).decode().splitlines()
        told.append([line for line in lines if "_created" not in line])
    assert told[0] == told[1]
