"""The number of drafts follows what was right and what rows cost."""

from __future__ import annotations

import pytest

from reference.sched.cost import Load, StepCost
from reference.sched.drafts import TRIED_PART, TRIED_STEPS, AcceptedTokens, DraftPolicy

DRAFT = 0.02
"""Seconds of making a draft, where a step takes one second."""


def measured(fixed: float, row: float) -> StepCost:
    """Steps that take ``fixed`` seconds and ``row`` for each token, as they were seen."""
    cost = StepCost()
    for _ in range(20):
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            cost.observe(Load(tokens, 0), fixed + row * tokens)
    return cost


def compared(policy: DraftPolicy, right: int, wrong: int) -> AcceptedTokens:
    """A sequence with so many right and wrong drafts, evenly mixed, as all others have them."""
    own, count = AcceptedTokens(), right + wrong
    for number in range(count):
        is_right = number * right // count < (number + 1) * right // count
        policy.note(1, 1 + is_right, 1, 0.0)
        own.note(1 + is_right, 1)
    return own


@pytest.mark.parametrize(
    ("right", "wrong", "row", "running", "least", "most"),
    [
        (80, 20, 0.01, 1, 3, 8),  # rows are cheap
        (80, 20, 0.5, 1, 1, 2),  # a row costs half a step
        (30, 70, 0.01, 1, 2, 4),
        (1, 99, 0.01, 1, 0, 0),
        (80, 20, 0.1, 64, 0, 0),  # the rows of 64 sequences cost more than the weights
        (99, 1, 0.001, 1, 8, 8),
    ],
)
def test_as_many_as_make_a_sequence_fastest(
    right: int, wrong: int, row: float, running: int, least: int, most: int
) -> None:
    policy = DraftPolicy(measured(1 - row, row))
    own = compared(policy, right, wrong)
    count = policy.count(own, running, 8)
    if not least:
        # Whether it is tried is another question.
        count = policy._best(own, running, 8)
    assert least <= count <= most


@pytest.mark.parametrize("row", [0.01, 0.3, 0.9])
def test_drafts_that_are_never_right_lose_little(row: float) -> None:
    """Simulated steps: whatever rows cost, trials lose a bounded part of the time."""
    cost = measured(1 - row, row)
    policy, own, lost, tokens = DraftPolicy(cost), AcceptedTokens(), 0.0, 0
    while tokens < 4000:
        count = policy.count(own, 1, 5)
        seconds = 1.0 + row * count + DRAFT * count
        if count:
            policy.note(count, 1, 1, seconds)
            own.note(1, count)
            lost += seconds - 1.0
        cost.observe(Load(1 + count, 0), 1.0 + row * count)
        tokens += 1
    assert 0 < lost <= TRIED_PART * cost.total + TRIED_STEPS + 6


def test_without_the_bound_they_would_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a policy that always tries loses more than the bound."""
    monkeypatch.setattr("reference.sched.drafts.TRIED_STEPS", 1e9)
    with pytest.raises(AssertionError):
        test_drafts_that_are_never_right_lose_little(0.9)


def test_a_step_that_something_held_up_counts_little() -> None:
    policy, own = DraftPolicy(measured(0.99, 0.01)), AcceptedTokens()
    policy.note(3, 4, 1, 100.0)
    own.note(4, 3)
    for _ in range(30):
        policy.note(3, 4, 1, 1.03 + 3 * DRAFT)
        own.note(4, 3)
    assert policy.count(own, 1, 8) > 3


def test_drafts_whose_first_steps_were_held_up_are_worth_it_later() -> None:
    """The first drafts wait until kernels are built; one that does not shows what a draft takes."""
    policy = DraftPolicy(measured(0.9, 0.1))
    own = compared(policy, 80, 20)
    for seconds in (30.0, 60.0, 40.0):
        policy.note(1, 2, 1, seconds)
    assert not policy._best(own, 1, 8)
    policy.note(1, 2, 1, 1.1 + DRAFT)
    assert policy._draft_seconds == pytest.approx(DRAFT)
    assert policy._best(own, 1, 8)


def test_sequences_are_read_where_drafts_are_worth_it_and_now_and_then_elsewhere() -> None:
    policy = DraftPolicy(measured(0.1, 0.9))
    assert sum(policy.follows(1, 5) for _ in range(160)) == 10
    assert all(DraftPolicy(measured(0.99, 0.01)).follows(1, 5) for _ in range(9))
    assert all(DraftPolicy(StepCost()).follows(1, 5) for _ in range(9))


@pytest.mark.parametrize(("plain", "worth"), [(1.0, True), (0.7, False)])
def test_drafts_are_compared_with_steps_that_the_host_plans_ahead(
    plain: float, worth: bool
) -> None:
    """A round with drafts waits for the host. Where tokens without drafts do not wait they may be
    faster than all measured steps, and nothing is drafted before that is known."""
    policy = DraftPolicy(measured(0.8, 0.2))
    own = compared(policy, 50, 50)
    policy.note_plain(1, plain)
    assert policy.count(own, 1, 3) == 0
    for _ in range(20):
        policy.note_plain(1, plain)
        policy.note(1, 1, 1, 1.2 + DRAFT)
    assert bool(policy._best(own, 1, 3)) == worth
