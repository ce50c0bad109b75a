"""The step planner as a pure function: what every plan guarantees, whatever is pending."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.sched.planner import Chunk, Pending, plan_step


@st.composite
def populations(draw: st.DrawFn) -> list[Pending]:
    """Sequences in distinct slots; of some there is nothing left to compute."""
    slots = draw(st.lists(st.integers(0, 63), unique=True, min_size=1, max_size=20))
    computed = [draw(st.integers(0, 200)) for _ in slots]
    left = [draw(st.sampled_from((0, 1, 1, 2, 40, 200))) for _ in slots]
    draft = [draw(st.sampled_from((0, 0, n - 1))) if n > 1 else 0 for n in left]
    columns = zip(slots, computed, left, draft, strict=True)
    return [Pending(slot, done, done + n, guesses) for slot, done, n, guesses in columns]


def remaining(pending: list[Pending]) -> dict[int, int]:
    """Tokens left to compute, by slot."""
    return {one.slot: one.length - one.computed for one in pending}


def decoding(pending: list[Pending]) -> list[Chunk]:
    """The chunks of sequences with one token left and its guesses."""
    return [
        Chunk(slot, computed, 1 + draft)
        for slot, computed, length, draft in pending
        if length - computed == 1 + draft
    ]


@given(populations(), st.integers(1, 300))
def test_every_decoding_sequence_is_in_every_step(pending, cap):
    """A sequence with one token left is never delayed, and comes before all prefill; its guesses
    come with it."""
    plan = plan_step(pending, cap)
    expected = decoding(pending)
    assert plan[: len(expected)] == expected


@given(populations(), st.integers(1, 300))
def test_prefill_stays_within_the_cap_and_in_order_of_age(pending, cap):
    """Prefill tokens sum to at most the cap; only the last prefilling sequence may be cut short."""
    left = remaining(pending)
    decodes = {slot for slot, _, _ in decoding(pending)}
    prefill = [chunk for chunk in plan_step(pending, cap) if chunk.slot not in decodes]
    total = sum(count for _, _, count in prefill)
    waiting = [slot for slot in left if left[slot] and slot not in decodes]
    assert [slot for slot, _, _ in prefill] == waiting[: len(prefill)]
    assert total == min(cap, sum(left[slot] for slot in waiting))
    for slot, _, count in prefill[:-1]:
        assert count == left[slot]


@given(populations(), st.integers(1, 300))
def test_chunks_continue_where_the_cache_ends(pending, cap):
    """Each sequence appears at most once, starting at its first uncomputed position."""
    plan = plan_step(pending, cap)
    assert len({chunk.slot for chunk in plan}) == len(plan)
    left = remaining(pending)
    starts = {one.slot: one.computed for one in pending}
    for slot, start, count in plan:
        assert start == starts[slot]
        assert 1 <= count <= left[slot]


@given(populations(), st.integers(1, 300))
def test_repeated_planning_finishes_everything(pending, cap):
    """No population starves: the work left shrinks with every step and reaches zero."""
    work = sum(remaining(pending).values())
    while work:
        computed = {slot: count for slot, _, count in plan_step(pending, cap)}
        pending = [
            one._replace(computed=one.computed + computed.get(one.slot, 0)) for one in pending
        ]
        now = sum(remaining(pending).values())
        assert now < work
        work = now
    assert plan_step(pending, cap) == []


def test_a_step_needs_a_positive_cap():
    with pytest.raises(ValueError, match="at least one token"):
        plan_step([Pending(0, 0, 5)], 0)
