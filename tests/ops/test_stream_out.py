"""STREAM_OUT: the ring against a list of everything ever written."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contract.records import OUTPUT_EVENT, STEP
from reference.ops.stream_out import stream_out

WORD = 1 << 32


def record_of(first_event: int) -> np.ndarray:
    return np.array([(9, 9, first_event, 0)], STEP).view(np.int32).reshape(1, 4)


@given(
    events=st.integers(1, 9),
    start=st.sampled_from([0, 1, 1000, WORD - 3]),
    steps=st.lists(st.integers(0, 6), max_size=8),
)
def test_ring_holds_the_latest_events(events, start, steps):
    """After any steps, entry n mod size is the last event of that residue; the numbers wrap."""
    ring = np.zeros((events, 8), np.int32)
    expected: dict[int, tuple[int, int, int, int]] = {}
    number = start
    for step, rows in enumerate(steps):
        query = np.array([(0, 7 + i, 100 * step + i, 0) for i in range(8)], np.int32)
        output_rows = np.arange(rows, dtype=np.int32)[::-1].copy()
        token = np.arange(rows, dtype=np.int32) + 1000 * step
        stream_out(
            token=token, output_rows=output_rows, query=query, step=record_of(number), ring=ring
        )
        for row, query_row in enumerate(output_rows.tolist()):
            event = (number, 1000 * step + row, 7 + query_row, 100 * step + query_row + 1)
            expected[number % events] = event
            number = (number + 1) % WORD
    records = ring.view(OUTPUT_EVENT)[:, 0]
    for index, event in expected.items():
        got = tuple(int(records[index][name]) for name in ("sequence", "token", "slot", "position"))
        assert got == event


def test_no_rows_writes_nothing():
    """A prefill chunk without output leaves the ring as it was."""
    ring = np.arange(24, dtype=np.int32).reshape(3, 8)
    before = ring.copy()
    none, query = np.empty(0, np.int32), np.zeros((4, 4), np.int32)
    stream_out(token=none, output_rows=none, query=query, step=record_of(5), ring=ring)
    assert (ring == before).all()
