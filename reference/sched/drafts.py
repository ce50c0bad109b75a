"""Choose how many tokens to draft: the number that is fastest, and 0 if drafting is slower.

A round makes drafts and runs the step that verifies them. If each draft is accepted with
probability p, k drafts yield 1 + p + ... + p^k tokens on average. A round is timed as a whole and
compared with the time that plain steps, those without drafts, take for as many tokens. Acceptance
is measured for each sequence and remembered for its tenant; the time of rounds is measured for the
model.

A credit account in seconds limits the loss if an estimate is wrong. A round that is slower than
plain steps is charged to it, over all sequences and requests, and so is what a drafter reads of
sequences without drafting. Plain steps add a small share of their time. Drafting stops when the
account is overdrawn by a few plain steps.

Drafts that take no time, those from prompt lookup, run in shadow first: they are compared with the
tokens that plain steps sample, while steps are still submitted ahead."""

from __future__ import annotations

import math
from typing import NamedTuple

from contract.arrays import Ints
from reference.sched.cost import StepCost
from reference.sched.draft_credit import CREDIT_STEPS, DraftCredit
from reference.sched.draft_history import Acceptance, DraftHistory
from reference.sched.plain_times import MedianTime, PlainTimes
from reference.sched.reading_times import KEPT_STATES_SHARE, ReadingTimes

TRIAL_TIME_SHARE = 0.006
"""The share of the time of plain steps that is added to the account."""
DEBT_STEPS = 4.0
"""How far the account may be overdrawn if drafts are expected to gain, in plain steps."""
TRIAL_STEPS = {False: CREDIT_STEPS, True: 1.0}
"""The credit, in plain steps, that a trial needs which is not expected to gain; the key says
whether rounds with as many sequences were measured."""
MIN_START_GAIN = 1.05
"""Drafting starts if it is expected to make a sequence faster by this factor. It goes on until it
is expected to make the sequence slower."""
FIRST_DRAFTS = 3
"""The most drafts of a round before any round was measured; later, twice the most measured."""
TENANTS_MAX = 256
"""Acceptance is remembered for this many tenants, those seen last."""
ROUNDS_MIN = 2
"""The number of rounds whose median counts as measured."""
UNMEASURED_ROUND, UNMEASURED_DRAFT = 1.1, 0.11
"""The assumed time of a round of one sequence, in plain steps, and of each of its drafts, until a
round was measured."""
SEQUENCES_POWER = 0.65
"""The time of drafts is assumed to grow with this power of the number of sequences."""
EXTRAPOLATED_COST = 0.5
"""In a round with more drafts than any measured one, each further draft is assumed to take this
part of the time of a measured draft."""
SHADOW_ROUND_COST = 2.0
"""The assumed time of a shadow round, in plain steps, until a round was measured."""
SHADOW_STEPS = {False: 24.0, True: 1.0}
"""The number of plain steps that shadow rounds must have saved, for each running sequence, before
drafting starts; the key says whether rounds were measured. The first round of a size is slow: it is
lowered or compiled."""
FIRST_FACTOR = 2.0
"""The first round of a size, which is lowered or compiled, counts as at most this many times the
expected time."""
HELD_UP_FACTOR = 1.5
"""Any later round counts as at most this many times the expected time or the time of the round
before. Other delays of a step are not charged to plain steps either."""
REMEASURE_ROUNDS = 512
"""The number of rounds after which plain steps are measured again."""
FORGET_STEPS = 4096
"""After this many plain steps in a row the times of rounds and of reading are forgotten."""
TRIAL_INTERVAL = 16
"""While drafting is not worth it, a sequence is considered again after this many tokens."""
FAILED_TRIALS_MAX = 3
"""After this many failed trials in a row, or if none is worth it, the drafter stops following a
sequence until the next trial."""


class _Choice(NamedTuple):
    """A number of drafts, the expected speed-up of a sequence with it, and the largest speed-up
    that any number would give if all drafts were accepted."""

    drafts: int
    gain: float
    gain_if_right: float


class DraftPolicy:
    """Chooses the number of drafts from acceptance rates and from the time of rounds."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self.length = 0.0
        """The mean number of tokens of the sequences that run, which the caller keeps up to
        date."""
        self._reading = ReadingTimes(cost)
        self._plain: dict[int, PlainTimes] = {}
        # Of steps that a draft block reads. They count where no others were measured.
        self._read: dict[int, PlainTimes] = {}
        self._rounds: dict[int, dict[int, MedianTime]] = {}
        self._tenants: dict[int, Acceptance] = {}
        self._latest: dict[tuple[int, int], float] = {}
        self._credit, self._sequence_seconds = DraftCredit(), 0.0
        self._rounds_since_plain = self._plain_since_round = 0
        # The sequences that run, and the steps at which those that drafts ended early would have
        # ended without drafts. Steps are counted since no sequence ran.
        self._running: set[DraftHistory] = set()
        self._ended: list[float] = []
        self._steps = 0.0
        self._peak = 1

    def new_history(self, tenant: int) -> DraftHistory:
        """The history of a new sequence of ``tenant``."""
        known = self._tenants.pop(tenant, None) or Acceptance()
        self._tenants[tenant] = known
        if len(self._tenants) > TENANTS_MAX:
            del self._tenants[next(iter(self._tenants))]
        history = DraftHistory(known, lead=self._min_lead())
        self._running.add(history)
        self._peak = max(self._peak, len(self._running))
        return history

    def forget(self, history: DraftHistory) -> None:
        """Drop the history of a sequence that ended or lost its slot."""
        self._running.discard(history)
        if not self._running:
            self._ended, self._steps, self._peak = [], 0.0, 1
        elif history.lead > self._min_lead():
            self._ended.append(self._steps + history.lead)

    def note_plain(self, running: int, seconds: float, read: int | None = None) -> None:
        """Record a plain step: each of ``running`` sequences got a token in ``seconds``. The time
        runs from one result to the next, since the host plans such steps while others are
        computed. A draft block that follows some of them read ``read`` tokens beside the step, at
        the expense of the account."""
        if not self._measures():
            seconds = 1.0
        elif seconds > 0 and not read:
            times = self._plain if read is None else self._read
            times.setdefault(running, PlainTimes()).add(seconds, self.length)
        self._steps += 1
        plain = self._plain_seconds(running)
        if read is not None and plain is not None and self._measures():
            if read:
                self._reading.note(read, seconds - plain)
            self._charge(KEPT_STATES_SHARE * plain + self._reading.seconds(read), running)
            seconds = plain
        if plain is not None:
            self._credit.open(plain)
        self._earn(TRIAL_TIME_SHARE * seconds, running)
        self._earn_batch(
            TRIAL_TIME_SHARE * seconds + self._lost_batching(running, running), running
        )
        self._rounds_since_plain = 0
        self._plain_since_round += 1
        if self._plain_since_round >= FORGET_STEPS:
            self._plain_since_round, self._reading = 0, ReadingTimes(self._cost)
            self._rounds.clear()

    def note_prompt(self, running: int, tokens: int) -> None:
        """Record that a draft block reads ``tokens`` tokens of prompts."""
        self._charge(self._reading.seconds(tokens), running)

    def draft_count(self, history: DraftHistory, running: int, limit: int, unread: int = 0) -> int:
        """The number of tokens to draft for a sequence, 0 to ``limit``, if the same number is
        drafted for each of ``running`` sequences. The account must pay for reading ``unread``
        tokens."""
        plain = self._plain_seconds(running)
        if plain is None or limit <= 0:
            return 0
        debt, best = DEBT_STEPS * plain, self._best_count(history, running, limit)
        # The account pays for a trial that could gain, even if it is not expected to.
        if history.rounds:
            least = -debt if best.gain >= 1.0 else 0.0
        else:
            trial = TRIAL_STEPS[bool(self._measured_counts(running))] * plain
            least = -debt if best.gain >= MIN_START_GAIN else trial
        credit = self._credit.of(running) - self._reading.seconds(unread)
        return best.drafts if best.gain_if_right >= MIN_START_GAIN and credit >= least else 0

    def should_begin(
        self, history: DraftHistory, known: int, running: int, limit: int, unread: int = 0
    ) -> bool:
        """Whether to start drafting for a sequence of ``known`` tokens; ``unread`` as in
        ``draft_count``."""
        if known < history.next_trial_at:
            return False
        worth = self.draft_count(history, running, limit, unread) > 0
        if not worth and limit > 0 and self._plain_seconds(running) is not None:
            history.next_trial_at = known + TRIAL_INTERVAL
            history.failed = FAILED_TRIALS_MAX
        elif history.failed >= FAILED_TRIALS_MAX:
            history.failed = 0
        return worth

    def compare_shadow_drafts(
        self, history: DraftHistory, tokens: Ints, draft: list[int], running: int
    ) -> bool:
        """Compare the shadow drafts of a sequence with its known ``tokens``, int32[n]. Once all are
        compared, ``draft`` becomes the next shadow round.

        True if shadow rounds have saved enough to start drafting, or the account is full."""
        plain, known = self._plain_seconds(running), bool(self._measured_counts(running))
        if plain is None:
            return False
        if not self._measures():
            return True
        came, drafts, tenant = (
            tokens[history.shadow_start :].tolist(),
            history.shadow_drafts,
            history.tenant,
        )
        same = [ours == theirs for ours, theirs in zip(drafts, came, strict=False)]
        if all(same) and len(came) < len(drafts):
            full = self._credit.all >= CREDIT_STEPS * plain
            return full or tenant.saved_steps >= SHADOW_STEPS[known] * running
        if drafts:
            right = [*same, False].index(False)
            history.compare(right, len(drafts))
            measured = self._round_seconds(running, len(drafts), plain) / plain
            cost = measured if known else SHADOW_ROUND_COST
            tenant.saved_steps = max(0.0, tenant.saved_steps + right + 1 - cost)
        history.shadow_drafts, history.shadow_start = draft, len(tokens)
        return False

    def give_up(self, history: DraftHistory, known: int) -> None:
        """Stop drafting for a while for a sequence of ``known`` tokens."""
        history.failed = 0 if history.balance > 0 else history.failed + 1
        history.next_trial_at = known + TRIAL_INTERVAL
        history.tenant.saved_steps = 0.0
        history.interrupt()

    def should_follow(self, tenant: int, running: int, limit: int, tokens: int) -> bool:
        """Whether the drafter should follow a new sequence from its prompt of ``tokens`` tokens on,
        which takes time by itself."""
        new = DraftHistory(self._tenants.get(tenant, Acceptance()))
        unknown = self._plain_seconds(running) is None
        return unknown or self.draft_count(new, running, limit, tokens) > 0

    def given_up(self, history: DraftHistory) -> bool:
        """Whether the drafter can stop following the sequence."""
        return self._measures() and history.failed >= FAILED_TRIALS_MAX

    def note_round(
        self, drafted: int, drafting: int, running: int, seconds: float, first: bool, read: int = 0
    ) -> None:
        """Record a round that took ``seconds``, in which ``drafting`` of ``running`` sequences had
        at most ``drafted`` drafts. In a ``first`` round of a sequence the drafter also computes the
        ``read`` tokens it has not read. The caller then calls ``note_gain`` for each sequence that
        had drafts."""
        plain, self._sequence_seconds = self._plain_seconds(running), 0.0
        self._steps += 1
        self._plain_since_round = 0
        if plain is None:
            return
        expected, size = self._round_seconds(running, drafted, plain), (running, drafted)
        if not self._measures():
            seconds = expected
        # The first step of a size is lowered or compiled. A later one that something else delayed
        # counts as at most a few times the usual time, once.
        latest = self._latest.get(size)
        if read and latest is not None:
            self._reading.note(read, seconds - expected)
        reading = self._reading.seconds(read)
        usual = reading + (
            FIRST_FACTOR * expected if latest is None else HELD_UP_FACTOR * max(expected, latest)
        )
        self._latest[size] = seconds - reading
        others = (running - drafting) * plain / running
        self._sequence_seconds = (min(seconds, usual) - others) / drafting
        if not first and drafting == running:
            rounds = self._rounds.setdefault(running, {})
            rounds.setdefault(drafted, MedianTime()).add(seconds, self.length)
        self._rounds_since_plain += 1
        if self._rounds_since_plain >= REMEASURE_ROUNDS:
            self._rounds_since_plain = 0
            self._plain.clear()
            self._read.clear()

    def note_gain(self, history: DraftHistory, gained: int, running: int) -> None:
        """Record that a sequence got ``gained`` tokens in the round noted latest."""
        history.lead += gained - 1
        plain = self._plain_seconds(running)
        if plain is None:
            return
        gain = gained * plain / running - self._sequence_seconds
        history.balance += gain
        self._earn(gain, running)
        together = gain if running > 1 else 0.0
        self._earn_batch(together + self._lost_batching(running, gained), running)

    def note_no_drafts(self, running: int, seconds: float) -> None:
        """Record that a step of ``running`` sequences waited ``seconds`` for drafts of a sequence
        and got none: its prompt has no match for the latest token, or a mask forbade them."""
        self._earn(-max(0.0, seconds), running)

    def _charge(self, seconds: float, running: int) -> None:
        self._earn(-seconds, running)
        self._earn_batch(-seconds if running > 1 else 0.0, running)

    def _earn(self, seconds: float, running: int) -> None:
        self._credit.earn(seconds, self._plain_seconds(running))

    def _measures(self) -> bool:
        """Whether steps are timed: some engines have no clock."""
        return self._cost.total > 0

    def _plain_seconds(self, running: int) -> float | None:
        """Seconds of a plain step of ``running`` sequences; None if it was not measured."""
        if not self._measures():
            return 1.0
        times = self._plain_times(running)
        return None if times is None else times.at(self.length)

    def _plain_times(self, running: int) -> PlainTimes | None:
        for times in (self._plain.get(running), self._read.get(running)):
            if times is not None and times.measured(self.length):
                return times
        return None

    def _min_lead(self) -> float:
        return min([one.lead for one in self._running], default=0.0)

    def _earn_batch(self, seconds: float, running: int) -> None:
        self._credit.earn_batch(seconds, self._plain_seconds(running))

    def _lost_batching(self, running: int, tokens: float) -> float:
        """Seconds that ``tokens`` cost more, as a number of at most 0, because sequences that
        drafts ended early no longer share the step."""
        if not self._ended:
            return 0.0
        # The tokens were computed already. Sequences that ended would have shared their steps.
        reached = self._steps + self._min_lead()
        shared = sum(end > reached - tokens for end in self._ended)
        self._ended = [end for end in self._ended if end > reached]
        limit = min(running + shared, self._peak)
        for count in range(limit, running, -1):
            plain = self._plain_seconds(count)
            usual = self._plain_seconds(running)
            if plain is not None and usual is not None:
                return min(0.0, plain / count - usual / running) * tokens
        return 0.0

    def _best_count(self, history: DraftHistory, running: int, limit: int) -> _Choice:
        """The number of drafts that makes a sequence fastest."""
        plain = self._plain_seconds(running)
        assert plain is not None
        longest = max(self._measured_counts(running), default=0)
        right = history.acceptance_rate if running == 1 else history.tenant_acceptance_rate
        best, tokens, next_right = _Choice(0, 0.0, 0.0), 1.0, 1.0
        could = 0.0
        for count in range(1, min(limit, max(FIRST_DRAFTS, 2 * longest)) + 1):
            next_right *= right
            tokens += next_right
            part = plain / self._round_seconds(running, count, plain)
            could = max(could, (count + 1) * part)
            if tokens * part > best.gain:
                best = _Choice(count, tokens * part, could)
        return best._replace(gain_if_right=could)

    def _measured_counts(self, running: int) -> list[int]:
        """The numbers of drafts for which rounds were measured."""
        measured = self._rounds.get(running, {})
        return [n for n, median in measured.items() if len(median.latest) >= ROUNDS_MIN]

    def _round_seconds(self, running: int, count: int, plain: float) -> float:
        """Expected seconds of a round with ``count`` drafts for each sequence: the measured time,
        or an estimate from the nearest measured number of drafts or of sequences."""
        known = self._measured_counts(running)
        if count in known:
            return self._measured_seconds(running, count, plain)
        if known:
            shorter = max((n for n in known if n < count), default=0)
            least = self._measured_seconds(running, shorter, plain) if shorter else plain
            longer = min((n for n in known if n > count), default=None)
            if longer is None:
                return least * (1 + EXTRAPOLATED_COST * (count / shorter - 1))
            more = self._measured_seconds(running, longer, plain) - plain
            return max(least, plain + more * count / longer)
        others = [n for n in self._rounds if self._measured_counts(n) and self._plain_seconds(n)]
        if not others:
            return plain * (
                UNMEASURED_ROUND + UNMEASURED_DRAFT * math.pow(running, SEQUENCES_POWER) * count
            )
        near = min(others, key=lambda n: abs(n - running))
        usual = self._plain_seconds(near)
        assert usual is not None
        more = self._round_seconds(near, count, usual) - usual
        return plain + more * math.pow(running / near, SEQUENCES_POWER)

    def _measured_seconds(self, running: int, count: int, plain: float) -> float:
        """Seconds of a round that was measured, with sequences as long as they are now: it grows
        with their length as plain steps do."""
        measured = self._rounds[running][count]
        times = self._plain_times(running)
        if times is None or not self._measures():
            return measured.seconds
        return max(plain, measured.seconds + plain - times.at(measured.length))
