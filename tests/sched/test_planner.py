"""The step planner: decode first, prefill within the cap, nothing forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.sched.planner import Chunk, Pending, plan_step


@st.composite
def populations(draw: st.DrawFn) -> list[Pending]:
    """Sequences in distinct slots, each with at least one token to compute."""
    slots = draw(st.lists(st.integers(0, 63), unique=True, min_size=1, max_size=20))
    pending = []
    for slot in slots:
        computed = draw(st.integers(0, 200))
        pending.append(Pending(slot, computed, computed + draw(st.integers(1, 200))))
    return pending


@given(populations(), st.integers(1, 300))
def test_every_decoding_sequence_is_in_every_step(pending: list[Pending], cap: int) -> None:
    """A sequence with one token left is never delayed, and comes before all prefill."""
    plan = plan_step(pending, cap)
    decoding = [Chunk(p.slot, p.computed, 1) for p in pending if p.remaining == 1]
    assert list(plan[: len(decoding)]) == decoding


@given(populations(), st.integers(1, 300))
def test_prefill_stays_within_the_cap_and_in_order_of_age(pending: list[Pending], cap: int) -> None:
    """Prefill tokens sum to at most the cap; only the last prefilling sequence may be cut short."""
    plan = plan_step(pending, cap)
    by_slot = {p.slot: p for p in pending}
    prefill = [chunk for chunk in plan if by_slot[chunk.slot].remaining > 1]
    assert sum(chunk.count for chunk in prefill) <= cap
    waiting = [p.slot for p in pending if p.remaining > 1]
    assert [chunk.slot for chunk in prefill] == waiting[: len(prefill)]
    for chunk in prefill[:-1]:
        assert chunk.count == by_slot[chunk.slot].remaining


@given(populations(), st.integers(1, 300))
def test_chunks_continue_where_the_cache_ends(pending: list[Pending], cap: int) -> None:
    """Each sequence appears at most once, starting at its first uncomputed position."""
    plan = plan_step(pending, cap)
    assert len({chunk.slot for chunk in plan}) == len(plan)
    by_slot = {p.slot: p for p in pending}
    for chunk in plan:
        assert chunk.start == by_slot[chunk.slot].computed
        assert 1 <= chunk.count <= by_slot[chunk.slot].remaining


@given(populations(), st.integers(1, 300))
def test_repeated_planning_finishes_everything(pending: list[Pending], cap: int) -> None:
    """No population starves: the work left shrinks with every step and reaches zero."""
    left = {p.slot: p for p in pending}
    work = sum(p.remaining for p in pending)
    while left:
        for chunk in plan_step(list(left.values()), cap):
            p = left.pop(chunk.slot)
            if p.remaining > chunk.count:
                left[p.slot] = Pending(p.slot, p.computed + chunk.count, p.length)
        remaining = sum(p.remaining for p in left.values())
        assert remaining < work
        work = remaining


def test_a_step_needs_a_positive_cap() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        plan_step([Pending(0, 0, 5)], 0)
