"""The step planner as a pure function: what every plan guarantees, whatever is pending."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.sched.planner import PENDING, plan_step

Pending = NDArray[np.void]


@st.composite
def populations(draw: st.DrawFn) -> Pending:
    """Sequences in distinct slots; of some there is nothing left to compute."""
    slots = draw(st.lists(st.integers(0, 63), unique=True, min_size=1, max_size=20))
    computed = [draw(st.integers(0, 200)) for _ in slots]
    left = [draw(st.sampled_from((0, 1, 1, 2, 40, 200))) for _ in slots]
    draft = [draw(st.sampled_from((0, 0, n - 1))) if n > 1 else 0 for n in left]
    rows = [(s, c, c + n, d) for s, c, n, d in zip(slots, computed, left, draft, strict=True)]
    return np.array(rows, PENDING)


def remaining(pending: Pending) -> dict[int, int]:
    """Tokens left to compute, by slot."""
    left = pending["length"] - pending["computed"]
    return dict(zip(pending["slot"].tolist(), left.tolist(), strict=True))


def decoding(pending: Pending) -> list[tuple[int, int, int]]:
    """The chunks of sequences with one token left and its guesses."""
    return [
        (slot, computed, 1 + draft)
        for slot, computed, length, draft in pending.tolist()
        if length - computed == 1 + draft
    ]


@given(populations(), st.integers(1, 300))
def test_every_decoding_sequence_is_in_every_step(pending: Pending, cap: int) -> None:
    """A sequence with one token left is never delayed, and comes before all prefill; its guesses
    come with it."""
    plan = plan_step(pending, cap).tolist()
    expected = decoding(pending)
    assert plan[: len(expected)] == expected


@given(populations(), st.integers(1, 300))
def test_prefill_stays_within_the_cap_and_in_order_of_age(pending: Pending, cap: int) -> None:
    """Prefill tokens sum to at most the cap; only the last prefilling sequence may be cut short."""
    left = remaining(pending)
    decodes = {slot for slot, _, _ in decoding(pending)}
    prefill = [chunk for chunk in plan_step(pending, cap).tolist() if chunk[0] not in decodes]
    total = sum(count for _, _, count in prefill)
    waiting = [slot for slot in pending["slot"].tolist() if left[slot] and slot not in decodes]
    assert [slot for slot, _, _ in prefill] == waiting[: len(prefill)]
    assert total == min(cap, sum(left[slot] for slot in waiting))
    for slot, _, count in prefill[:-1]:
        assert count == left[slot]


@given(populations(), st.integers(1, 300))
def test_chunks_continue_where_the_cache_ends(pending: Pending, cap: int) -> None:
    """Each sequence appears at most once, starting at its first uncomputed position."""
    plan = plan_step(pending, cap)
    assert len(set(plan["slot"].tolist())) == len(plan)
    left = remaining(pending)
    starts = dict(pending[["slot", "computed"]].tolist())
    for slot, start, count in plan.tolist():
        assert start == starts[slot]
        assert 1 <= count <= left[slot]


@given(populations(), st.integers(1, 300))
def test_repeated_planning_finishes_everything(pending: Pending, cap: int) -> None:
    """No population starves: the work left shrinks with every step and reaches zero."""
    places = {slot: index for index, slot in enumerate(pending["slot"].tolist())}
    work = sum(remaining(pending).values())
    while work:
        for slot, _, count in plan_step(pending, cap).tolist():
            pending["computed"][places[slot]] += count
        now = sum(remaining(pending).values())
        assert now < work
        work = now
    assert len(plan_step(pending, cap)) == 0


def test_a_step_needs_a_positive_cap() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        plan_step(np.array([(0, 0, 5, 0)], PENDING), 0)
