"""Schedules for ops that keep state: which tokens of which slots a step holds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

Token = tuple[int, int]
"""Slot and position."""


@st.composite
def schedules(draw: st.DrawFn, slots: int = 3, longest: int = 12) -> list[list[Token]]:
    """Steps that take every slot from position 0 on, in any interleaving and any split."""
    positions = dict.fromkeys(range(slots), 0)
    tokens = []
    for slot in draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=longest)):
        tokens.append((slot, positions[slot]))
        positions[slot] += 1
    cuts = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {0, len(tokens)})
    return [tokens[first:stop] for first, stop in pairwise(cuts)]
