"""Ranges taken of a block of memory and given back."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from accel.packets.holes import Holes


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_places_never_overlap_and_all_come_back(requests: list[tuple[int, bool]]) -> None:
    """Takes and gifts in any order: what is taken is disjoint, and in the end all is one hole."""
    holes = Holes(24)
    taken: list[tuple[int, int]] = []
    for size, gives in requests:
        if gives and taken:
            holes.give_back(*taken.pop(len(taken) // 2))
        elif (start := holes.take(size)) is not None:
            taken.append((start, size))
        used = sorted(taken)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(used))
        assert holes.nbytes + sum(size for _, size in taken) == 24
    for place in taken:
        holes.give_back(*place)
    assert holes.whole
