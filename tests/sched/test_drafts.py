"""The number of drafts follows what was right and what rounds take."""

import numpy as np

from reference.sched.cost import Load, StepCost
from reference.sched.draft_credit import CREDIT_STEPS, FIRST_CREDIT_STEPS
from reference.sched.draft_history import DraftHistory
from reference.sched.drafts import (
    DEBT_STEPS,
    FAILED_TRIALS_MAX,
    FIRST_DRAFTS,
    REMEASURE_ROUNDS,
    TENANTS_MAX,
    TRIAL_INTERVAL,
    TRIAL_TIME_SHARE,
    DraftPolicy,
)
from reference.sched.plain_times import MEASUREMENTS_MIN, SHORT_TOKENS

PLAIN = 1.0


def policy_of(running: int = 1) -> DraftPolicy:
    """A policy that has measured plain steps of a second."""
    cost = StepCost()
    cost.observe(Load(1, 0), PLAIN)
    policy = DraftPolicy(cost)
    for _ in range(MEASUREMENTS_MIN):
        policy.note_plain(running, PLAIN)
    return policy


def note(policy: DraftPolicy, own: DraftHistory, drafts: int, gained: int, seconds: float) -> None:
    """Note a round of the only sequence that runs."""
    first = not own.rounds
    own.note(gained, drafts)
    policy.note_round(drafts, 1, 1, seconds, first=first)
    policy.note_gain(own, gained, 1)


def rounds(policy: DraftPolicy, own: DraftHistory, row: float, right: int, count: int) -> int:
    """The drafts of the last of ``count`` rounds of a sequence. Each round has as many as the
    policy says, of which the first ``right`` are, and each draft takes ``row`` seconds."""
    drafts = 0
    for _ in range(count):
        drafts = policy.draft_count(own, 1, 8)
        if drafts:
            note(policy, own, drafts, 1 + min(right, drafts), PLAIN + row * drafts)
    return drafts


def test_as_many_as_make_a_sequence_fastest():
    assert rounds(policy_of(), DraftHistory(), 0.01, 8, 40) == 8
    assert 1 <= rounds(policy_of(), DraftHistory(), 0.2, 2, 40) <= 4
    assert rounds(policy_of(), DraftHistory(), 0.1, 0, 200) == 0
    assert rounds(policy_of(), DraftHistory(), 1.1, 8, 40) == 0


def test_nothing_is_drafted_for_many_sequences_before_it_was_measured_for_fewer():
    for running in (32, 64, 256):
        policy = policy_of(running)
        for _ in range(2000):
            policy.note_plain(running, PLAIN)
        assert not policy.draft_count(policy.new_history(0), running, 11)


def test_what_rounds_take_is_known_for_other_numbers_of_sequences():
    """Rounds of sixteen sequences begin where those of four took next to nothing more."""
    policy, own = policy_of(4), DraftHistory()
    for _ in range(MEASUREMENTS_MIN):
        policy.note_plain(16, PLAIN)
    assert not policy.draft_count(own, 16, 3)
    for number in range(4):
        policy.note_round(3, 4, 4, 1.02 * PLAIN, first=not number)
    assert policy.draft_count(own, 16, 3)


def test_a_sequence_for_which_drafts_are_not_begun_is_read_no_more():
    policy, own = policy_of(), DraftHistory()
    for _ in range(2 * MEASUREMENTS_MIN):
        note(policy, own, 3, 1, 9 * PLAIN)
    fresh, tokens = DraftHistory(), 0
    while not policy.given_up(fresh):
        assert not policy.should_begin(fresh, tokens, 1, 3)
        tokens += 1
    assert tokens <= FAILED_TRIALS_MAX * TRIAL_INTERVAL


def test_one_tenant_learns_nothing_of_what_another_accepts():
    policy = policy_of()
    before = policy.new_history(2).acceptance_rate
    rounds(policy, policy.new_history(1), 0.1, 0, 4)
    assert policy.new_history(1).acceptance_rate < before == policy.new_history(2).acceptance_rate
    for tenant in range(3, TENANTS_MAX + 3):
        policy.new_history(tenant)
    assert len(policy._tenants) == TENANTS_MAX
    assert policy.new_history(1).acceptance_rate == before


def test_one_account_pays_for_all_sequences_and_tenants():
    """Each of a thousand tenants has another sequence, of which no draft is right."""
    policy, lost, plain = policy_of(), 0.0, 0
    for tenant in range(1000):
        own = policy.new_history(tenant)
        while drafts := policy.draft_count(own, 1, 3):
            note(policy, own, drafts, 1, 2 * PLAIN)
            lost += PLAIN
        policy.note_plain(1, PLAIN)
        plain += 1
        policy.forget(own)
    constant = FIRST_CREDIT_STEPS + DEBT_STEPS + 1
    assert 3 * PLAIN < lost <= constant * PLAIN + TRIAL_TIME_SHARE * plain * PLAIN


def test_sequences_that_end_apart_pay_for_what_the_last_one_takes_alone():
    """Two sequences of forty tokens. One gets four in a round, the other one, which then decodes
    alone: as many steps as without drafts, and rounds in addition."""

    def drafts_after(turns: int, gained: tuple[int, int], charged: bool = True) -> int:
        policy = policy_of(2)
        if not charged:
            policy._lost_batching = lambda running, tokens: 0.0  # type: ignore[method-assign]
        for _ in range(MEASUREMENTS_MIN):
            policy.note_plain(1, PLAIN)
        for _ in range(turns):
            both = [policy.new_history(0), policy.new_history(0)]
            for number in range(40 // gained[0]):
                policy.note_round(3, 2, 2, 1.3 * PLAIN, first=not number)
                for own, tokens in zip(both, gained, strict=True):
                    own.note(tokens, 3, 2)
                    policy.note_gain(own, tokens, 2)
            policy.forget(both[0])
            for _ in range(40 - 40 // gained[0] * gained[1]):
                policy.note_plain(1, PLAIN)
            policy.forget(both[1])
        return policy.draft_count(policy.new_history(0), 2, 3)

    assert drafts_after(8, (4, 4))
    assert not drafts_after(8, (4, 1))
    assert drafts_after(8, (4, 1), charged=False)


def test_a_step_that_waited_for_drafts_and_got_none_is_charged_whole():
    policy = policy_of(16)
    for number in range(9):
        policy.note_round(3, 16, 16, 1.1 * PLAIN, first=not number)
        own = policy.new_history(0)
        for _ in range(16):
            own.note(4, 3, 16)
            policy.note_gain(own, 4, 16)
    assert policy.draft_count(own, 16, 3)
    for _ in range(2 * int(CREDIT_STEPS)):
        policy.note_no_drafts(16, PLAIN)
    assert not policy.draft_count(own, 16, 3)


def test_a_round_that_something_else_held_up_is_charged_once():
    policy, own = policy_of(), DraftHistory()
    assert rounds(policy, own, 0.1, 3, 20)
    note(policy, own, 3, 4, 100 * PLAIN)
    assert policy.draft_count(own, 1, 3)
    note(policy, own, 3, 4, 100 * PLAIN)
    assert not policy.draft_count(own, 1, 3)


def test_longer_rounds_are_tried_once_shorter_ones_were_measured():
    policy, own = policy_of(), DraftHistory()
    assert rounds(policy, own, 0.01, 8, 1) == FIRST_DRAFTS
    assert rounds(policy, own, 0.01, 8, MEASUREMENTS_MIN + 1) == 2 * FIRST_DRAFTS


def test_drafts_from_the_prompt_are_rehearsed_before_a_step_waits_for_them():
    tokens = np.arange(400, dtype=np.int32)

    def begins_at(right: int, running: int = 1) -> int | None:
        """After how many tokens drafts begin whose first ``right`` are right."""
        policy, own = policy_of(running), DraftHistory()
        for known in range(1, 400):
            draft = [at if at < known + right else -1 for at in range(known, known + 3)]
            if policy.compare_shadow_drafts(own, tokens[:known], draft, running):
                return known
        return None

    assert 30 < (begins_at(3) or 0) < 50
    assert 120 < (begins_at(3, running=4) or 0) < 200
    assert begins_at(1) is None
    assert DraftPolicy(StepCost()).compare_shadow_drafts(DraftHistory(), tokens, [], 1)


def test_nothing_is_drafted_before_plain_steps_are_measured_and_now_and_then():
    policy, own = policy_of(), DraftHistory()
    assert rounds(policy, own, 0.01, 8, 4)
    for _ in range(REMEASURE_ROUNDS):
        note(policy, own, 3, 4, 1.3)
    assert not policy.draft_count(own, 1, 3)
    for number in range(MEASUREMENTS_MIN):
        assert not policy.should_begin(own, number, 1, 3)
        policy.note_plain(1, PLAIN)
    assert policy.should_begin(own, 9, 1, 3)


def test_a_full_account_pays_for_a_trial_whatever_is_expected():
    policy, own = policy_of(), DraftHistory()
    assert rounds(policy, own, 1.0, 0, 40) == 0
    policy.give_up(own, 0)
    tokens = 0
    while not policy.should_begin(own, tokens, 1, 3):
        policy.note_plain(1, PLAIN)
        tokens += 1
    assert 32 < tokens < 400


def test_sequences_are_read_where_drafts_are_worth_it_or_nothing_is_known():
    policy = policy_of()
    assert policy.should_follow(0, 1, 5, 32)
    rounds(policy, policy.new_history(0), 1.1, 0, 40)
    assert not any(policy.should_follow(0, 1, 5, 32) for _ in range(40))
    assert DraftPolicy(StepCost()).should_follow(0, 1, 5, 32)


def test_what_is_read_without_drafts_is_charged():
    """Reading takes as long as was measured."""
    policy = policy_of()
    drafts = policy.draft_count(policy.new_history(0), 1, 3)
    before = policy._credit.all
    policy.note_plain(1, 3 * PLAIN, 64)
    assert policy._credit.all < before - 2 * PLAIN
    assert drafts == policy.draft_count(policy.new_history(0), 1, 3)
    assert not policy.draft_count(policy.new_history(0), 1, 3, 256)
    assert not policy.should_follow(0, 1, 3, 256)
    policy.note_prompt(1, 160)
    assert not policy.draft_count(policy.new_history(0), 1, 3)


def test_a_median_of_read_steps_counts_until_others_were_measured():
    cost = StepCost()
    cost.observe(Load(1, 0), PLAIN)
    policy = DraftPolicy(cost)
    for _ in range(MEASUREMENTS_MIN):
        policy.note_plain(1, 1.1 * PLAIN, 0)
    assert policy._plain_seconds(1) == 1.1 * PLAIN
    for _ in range(MEASUREMENTS_MIN):
        policy.note_plain(1, PLAIN)
    assert policy._plain_seconds(1) == PLAIN


def test_a_first_round_is_charged_for_what_it_reads():
    lost = []
    for read in (0, 512):
        policy = policy_of()
        for number in range(2):
            policy.note_round(3, 1, 1, PLAIN, first=not number)
        before = policy._credit.all
        policy.note_round(3, 1, 1, 9 * PLAIN, first=True, read=read)
        policy.note_gain(policy.new_history(0), 1, 1)
        lost.append(before - policy._credit.all)
    assert lost[0] < 2 * PLAIN
    assert lost[1] > 7 * PLAIN


def test_a_sequence_is_given_up_after_trials_in_a_row_that_gained_nothing():
    policy, own = policy_of(), DraftHistory()
    for trial in range(FAILED_TRIALS_MAX):
        assert not policy.given_up(own)
        note(policy, own, 3, 1, 1.6)
        policy.give_up(own, 1000 * trial)
    assert policy.given_up(own)


def test_plain_steps_are_known_by_the_length_of_their_sequences():
    """Steps behind 2,048 tokens take twice as long. Shorter sequences are measured anew, those
    between two lengths are not, and rounds grow as plain steps do."""
    policy, own = policy_of(), DraftHistory()
    policy.length = 8 * SHORT_TOKENS
    for _ in range(MEASUREMENTS_MIN):
        policy.note_plain(1, 2 * PLAIN)
    rounds(policy, own, 0.1, 3, 1)
    drafts = rounds(policy, own, 0.1, 3, 9)
    assert drafts > 1
    note(policy, own, drafts, 1, 2.1 * PLAIN)
    policy.length = 4 * SHORT_TOKENS
    assert PLAIN < policy._plain_seconds(1) < 2 * PLAIN  # type: ignore[operator]
    policy.length = 0
    assert policy._plain_seconds(1) == PLAIN
    short = policy._round_seconds(1, drafts, PLAIN)
    assert PLAIN <= short < 1.5 * PLAIN
    # Behind such rounds plain steps are measured again, of long sequences first.
    policy._plain.clear()
    policy.length = 8 * SHORT_TOKENS
    for _ in range(MEASUREMENTS_MIN):
        policy.note_plain(1, 2 * PLAIN)
    assert policy.draft_count(own, 1, 5)
    policy.length = 0
    assert not policy.draft_count(own, 1, 5)
