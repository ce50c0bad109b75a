"""The number of drafts follows what was right and what rounds take."""

from __future__ import annotations

import numpy as np

from reference.sched.cost import Load, StepCost
from reference.sched.drafts import (
    FAILED_TRIALS_MAX,
    FIRST_DRAFTS,
    MEASUREMENTS_MIN,
    REMEASURE_ROUNDS,
    TRIAL_INTERVAL,
    DraftHistory,
    DraftPolicy,
)

PLAIN = 1.0


def policy_of(running: int = 1) -> DraftPolicy:
    """A policy that has measured plain steps of a second."""
    cost = StepCost()
    cost.observe(Load(1, 0), PLAIN)
    policy = DraftPolicy(cost)
    for _ in range(MEASUREMENTS_MIN):
        policy.note_plain(running, PLAIN)
    return policy


def rounds(policy: DraftPolicy, own: DraftHistory, row: float, right: int, count: int) -> int:
    """The drafts of the last of ``count`` rounds of a sequence. Each round has as many as the
    policy says, of which the first ``right`` are, and each draft takes ``row`` seconds."""
    drafts = 0
    for _ in range(count):
        drafts = policy.count(own, 1, 8)
        if drafts:
            gained = 1 + min(right, drafts)
            own.note(gained, drafts)
            policy.note(own, drafts, gained, 1, PLAIN + row * drafts, 1)
    return drafts


def test_as_many_as_make_a_sequence_fastest() -> None:
    assert rounds(policy_of(), DraftHistory(), 0.01, 8, 40) == 8
    assert 1 <= rounds(policy_of(), DraftHistory(), 0.2, 2, 40) <= 4
    assert rounds(policy_of(), DraftHistory(), 0.1, 0, 200) == 0
    assert rounds(policy_of(), DraftHistory(), 1.1, 8, 40) == 0


def test_many_sequences_need_more_gain() -> None:
    """Rounds that make one sequence a third faster go on; those of sixteen do not."""
    for running, drafts in ((1, 3), (16, 0)):
        policy, own = policy_of(running), DraftHistory()
        for _ in range(9):
            own.note(4, 3)
            policy.note(own, 3, 4, running, 3 * PLAIN, running)
        assert policy.count(own, running, 3) == drafts


def test_a_sequence_for_which_drafts_are_not_begun_is_read_no_more() -> None:
    policy, own = policy_of(16), DraftHistory()
    for _ in range(2 * MEASUREMENTS_MIN):
        policy.note(own, 3, 1, 16, 9 * PLAIN, 16)
    fresh, tokens = DraftHistory(), 0
    while not policy.given_up(fresh):
        assert not policy.begins(fresh, tokens, 16, 3)
        tokens += 1
    assert tokens <= FAILED_TRIALS_MAX * TRIAL_INTERVAL


def test_longer_rounds_are_tried_once_shorter_ones_were_measured() -> None:
    policy, own = policy_of(), DraftHistory()
    assert rounds(policy, own, 0.01, 8, 1) == FIRST_DRAFTS
    assert rounds(policy, own, 0.01, 8, MEASUREMENTS_MIN + 1) == 2 * FIRST_DRAFTS


def test_drafts_from_the_prompt_are_rehearsed_before_a_step_waits_for_them() -> None:
    tokens = np.arange(400, dtype=np.int32)

    def begins_at(right: int, running: int = 1) -> int | None:
        """After how many tokens drafts begin whose first ``right`` are right."""
        policy, own = policy_of(running), DraftHistory()
        for known in range(1, 400):
            draft = [at if at < known + right else -1 for at in range(known, known + 3)]
            if policy.rehearse(own, tokens[:known], draft, running):
                return known
        return None

    assert 30 < (begins_at(3) or 0) < 50
    assert 120 < (begins_at(3, running=4) or 0) < 200
    assert begins_at(1) is None
    assert DraftPolicy(StepCost()).rehearse(DraftHistory(), tokens, [], 1)


def test_nothing_is_drafted_before_plain_steps_are_measured_and_now_and_then() -> None:
    policy, own = policy_of(), DraftHistory()
    assert rounds(policy, own, 0.01, 8, 4)
    for _ in range(REMEASURE_ROUNDS):
        policy.note(own, 3, 4, 1, 1.3, 1)
    assert not policy.count(own, 1, 3)
    for number in range(MEASUREMENTS_MIN):
        assert not policy.begins(own, number, 1, 3)
        policy.note_plain(1, PLAIN)
    assert policy.begins(own, 9, 1, 3)


def test_a_full_account_pays_for_a_trial_whatever_is_expected() -> None:
    policy, own = policy_of(), DraftHistory()
    assert rounds(policy, own, 1.0, 0, 40) == 0
    policy.give_up(own, 0)
    tokens = 0
    while not policy.begins(own, tokens, 1, 3):
        policy.note_plain(1, PLAIN)
        tokens += 1
    assert 100 < tokens < 2000


def test_sequences_are_read_where_drafts_are_worth_it_and_now_and_then_elsewhere() -> None:
    policy = policy_of()
    assert all(policy.follows(1, 5) for _ in range(9))
    rounds(policy, DraftHistory(), 1.1, 0, 40)
    assert sum(policy.follows(1, 5) for _ in range(10 * TRIAL_INTERVAL)) == 10
    assert all(DraftPolicy(StepCost()).follows(1, 5) for _ in range(9))


def test_a_sequence_is_given_up_after_trials_in_a_row_that_gained_nothing() -> None:
    policy, own = policy_of(), DraftHistory()
    for trial in range(FAILED_TRIALS_MAX):
        assert not policy.given_up(own)
        own.note(1, 3)
        policy.note(own, 3, 1, 1, 1.6, 1)
        policy.give_up(own, 1000 * trial)
    assert policy.given_up(own)
