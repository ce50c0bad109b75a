"""The number of drafts follows what was right and what rows cost."""

from __future__ import annotations

import pytest

from reference.sched.cost import Load, StepCost
from reference.sched.drafts import LEAST_GAIN, MEASURED, PLAIN_ROUNDS, AcceptedTokens, DraftPolicy


def measured(fixed: float, row: float) -> DraftPolicy:
    """A policy for steps that take ``fixed`` seconds and ``row`` for each token."""
    cost = StepCost()
    for _ in range(20):
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            cost.observe(Load(tokens, 0), fixed + row * tokens)
    policy = DraftPolicy(cost)
    for _ in range(MEASURED):
        policy.note_plain(1, fixed + row)
    return policy


def compared(policy: DraftPolicy, right: int, wrong: int) -> AcceptedTokens:
    """A sequence with so many right and wrong drafts, evenly mixed, as all others have them."""
    own, count = AcceptedTokens(), right + wrong
    for number in range(count):
        is_right = number * right // count < (number + 1) * right // count
        policy.note(own, 1, 1 + is_right, 1, 0.0, 1)
        own.note(1 + is_right, 1)
    return own


@pytest.mark.parametrize(
    ("right", "wrong", "row", "running", "least", "most"),
    [
        (80, 20, 0.01, 1, 3, 8),  # rows are cheap
        (80, 20, 0.2, 1, 1, 4),  # a row costs a fifth of a step
        (30, 70, 0.01, 1, 2, 4),
        (1, 99, 0.01, 1, 0, 0),
        (80, 20, 0.1, 64, 0, 0),  # the rows of 64 sequences cost more than the weights
        (99, 1, 0.001, 1, 8, 8),
    ],
)
def test_as_many_as_make_a_sequence_fastest(
    right: int, wrong: int, row: float, running: int, least: int, most: int
) -> None:
    policy = measured(1 - row, row)
    own = compared(policy, right, wrong)
    best = policy._best(own, running, 8, tries=True)
    assert least <= best.drafts * (best.gain >= LEAST_GAIN) <= most


def test_nothing_is_drafted_before_plain_steps_are_measured_and_now_and_then() -> None:
    policy = measured(0.9, 0.1)
    own = compared(policy, 80, 20)
    assert policy.count(own, 1, 3)
    for _ in range(PLAIN_ROUNDS):
        policy.note(own, 3, 4, 1, 1.3, 1)
    assert not policy.count(own, 1, 3)
    for number in range(MEASURED):
        assert not policy.begins(own, number, 1, 3)
        policy.note_plain(1, 1.0)
    assert policy.begins(own, 9, 1, 3)


@pytest.mark.parametrize(("plain", "worth"), [(1.0, True), (0.7, False)])
def test_rounds_are_compared_with_steps_that_the_host_plans_ahead(
    plain: float, worth: bool
) -> None:
    """A round waits for the host, as steps may not that the host plans ahead."""
    policy = measured(0.8, 0.2)
    own = compared(policy, 50, 50)
    for _ in range(20):
        policy.note_plain(1, plain)
        policy.note(own, 1, 1, 1, 1.25, 1)
    assert bool(policy.count(own, 1, 1)) == worth


def test_sequences_are_read_where_drafts_are_worth_it_and_now_and_then_elsewhere() -> None:
    policy = measured(0.1, 0.9)
    assert all(policy.follows(1, 5) for _ in range(16))
    policy.give_up(AcceptedTokens(), 0, 1, 5)
    assert sum(policy.follows(1, 5) for _ in range(160)) == 10
    assert all(measured(0.99, 0.01).follows(1, 5) for _ in range(9))
    assert all(DraftPolicy(StepCost()).follows(1, 5) for _ in range(9))


def test_a_sequence_is_given_up_after_trials_in_a_row_that_gained_nothing() -> None:
    policy, own = measured(0.9, 0.1), AcceptedTokens()
    for trials in range(3):
        assert not policy.given_up(own)
        assert policy.begins(own, 1000 * trials, 1, 3) == (trials == 0)
        own.note(1, 3)
        policy.note(own, 3, 1, 1, 1.6, 1)
        policy.give_up(own, 1000 * trials, 1, 3)
    assert policy.given_up(own)
