"""Ranges of a block of memory, allocated and freed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from accel.packets.free_ranges import FreeRanges


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_allocations_never_overlap_and_all_can_be_freed(requests: list[tuple[int, bool]]) -> None:
    """In any order: allocations are disjoint, and once all are freed, one free range is left."""
    ranges = FreeRanges(24)
    allocated: list[tuple[int, int]] = []
    for size, frees in requests:
        if frees and allocated:
            ranges.free(*allocated.pop(len(allocated) // 2))
        elif (start := ranges.allocate(size)) is not None:
            allocated.append((start, size))
        used = sorted(allocated)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(used))
        assert ranges.free_bytes + sum(size for _, size in allocated) == 24
    for each in allocated:
        ranges.free(*each)
    assert ranges.all_free
