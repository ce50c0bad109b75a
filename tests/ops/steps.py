"""Schedules for ops that keep state: which tokens of which slots a step holds."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Token = tuple[int, int]
"""Slot and position."""
Float32 = NDArray[np.float32]


def queries(tokens: Sequence[Token]) -> NDArray[np.int32]:
    """The QUERY records of a step."""
    records = [(7, slot, position, 0) for slot, position in tokens]
    return np.array(records, np.int32).reshape(-1, 4)


def assert_slots_are_apart(
    steps: Sequence[list[Token]],
    advance: Callable[[list[Token], slice], Float32],
    alone: Callable[[list[int]], Float32],
) -> None:
    """Every slot gives what it gives alone. ``advance(tokens, rows)`` is a step of those rows of
    the inputs, ``alone(rows)`` one slot with them in a single step."""
    tokens = [token for step in steps for token in step]
    outputs: list[Float32] = []
    first = 0
    for step in steps:
        outputs.append(advance(step, slice(first, first + len(step))))
        first += len(step)
    got = np.concatenate(outputs)
    for slot in {slot for slot, _ in tokens}:
        rows = [row for row, token in enumerate(tokens) if token[0] == slot]
        assert (got[rows] == alone(rows)).all()


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
