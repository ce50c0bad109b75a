"""Choose the number of tokens to draft: the number that is fastest, and none if drafts lose.

A round makes drafts and computes the step that verifies them. With a part p of all drafts right, k
of them yield 1 + p + ... + p^k tokens on average. Rounds are measured as a whole and compared with
what as many tokens take without drafts. What was right is known for each sequence and remembered
for its tenant; what rounds take, for the model.

An account of the model keeps the loss small, whatever is expected. What rounds take longer than
plain steps is paid from it, over all sequences and requests, and plain steps earn a little of
their time. Drafts end when it is overdrawn by a few plain steps.

Drafts that take no time, those from the prompt, are rehearsed first: compared with the tokens that
plain steps sample, while steps are still submitted ahead."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from contract.lazy_dataclass import dataclass
from reference.sched.cost import StepCost
from reference.sched.draft_history import Acceptance, DraftHistory

TRIAL_TIME_SHARE = 0.006
"""The part of the time of plain steps that trials may lose."""
CREDIT_STEPS = 7.0
"""The most plain steps that the account has."""
TOGETHER_STEPS = 64.0
"""The most plain steps that several sequences have gained and may lose where they end apart."""
FIRST_CREDIT_STEPS = 2.0
"""The plain steps that the account has at first."""
DEBT_STEPS = 4.0
"""By how many plain steps the account may be overdrawn where drafts are expected to gain."""
TRIAL_STEPS = {False: CREDIT_STEPS, True: 1.0}
"""With how many plain steps the account pays for a trial that is not expected to gain, by whether
rounds of as many sequences were measured."""
MIN_START_GAIN = 1.05
"""Drafts begin where they are expected to make a sequence faster by this factor, and go on until
they are expected to make it slower."""
HOPELESS_GAIN = 0.9
"""A trial that is not begun where less is expected counts as failed."""
FIRST_DRAFTS = 3
"""Most drafted tokens in a round until a round was measured; then twice those of the longest."""
TENANTS_MAX = 256
"""Of so many tenants it is remembered what was right; the one seen longest ago is forgotten."""
MEASUREMENTS_MIN = 3
"""The median of so many plain steps counts as measured; at most three times as many are
remembered."""
ROUNDS_MIN = 2
"""The median of so many rounds counts as measured."""
UNMEASURED_ROUND, UNMEASURED_DRAFT = 1.1, 0.11
"""Assumed time of a round of one sequence without its drafts in plain steps, and of each draft,
until a round was measured."""
SEQUENCES_POWER = 0.65
"""With this power of the number of sequences the time of drafts is assumed to grow."""
EXTRAPOLATED_COST = 0.5
"""Which part of the time of a measured draft each one takes that makes the round longer than any
measured one."""
REHEARSED_COST = 2.0
"""Assumed time of a rehearsed round in plain steps, until one was measured."""
REHEARSED_STEPS = {False: 24.0, True: 1.0}
"""How many plain steps rehearsed rounds must save before drafts begin, for each sequence that runs,
by whether rounds were measured: the first one of each size is lowered or compiled."""
FIRST_FACTOR = 2.0
"""The first round of a size, which is lowered or compiled, counts at most as so many times what is
expected."""
HELD_UP_FACTOR = 1.5
"""Another one counts at most as so many times what is expected or the one before took: what else
holds up a step is not counted of plain steps either."""
REMEASURE_ROUNDS = 512
"""After so many rounds plain steps are measured again."""
FORGET_STEPS = 4096
"""After so many plain steps in a row what rounds took is forgotten."""
TRIAL_INTERVAL = 16
"""Where drafts are not worth it, one in so many sequences is read by the drafter, and every so many
tokens it is asked again whether they are."""
FAILED_TRIALS_MAX = 3
"""After so many failed trials in a row the drafter stops reading a sequence, which costs time."""


@dataclass(slots=True)
class _Median:
    """The lower median of the latest durations, in seconds."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=3 * MEASUREMENTS_MIN))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.latest.append(seconds)
        self.seconds = sorted(self.latest)[(len(self.latest) - 1) // 2]


class _Choice(NamedTuple):
    """A number of drafts, by which factor it is expected to make a sequence faster, and by which
    factor some number would if all drafts were right."""

    drafts: int
    gain: float
    most: float


class DraftPolicy:
    """Decides the number of drafts from how many were right and from what rounds take."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._plain: dict[int, _Median] = {}
        self._rounds: dict[int, dict[int, _Median]] = {}
        self._tenants: dict[int, Acceptance] = {}
        self._latest: dict[tuple[int, int], float] = {}
        self._credit = self._together = self._share = 0.0
        self._opened = False
        self._followed = self._unmeasured = self._undrafted = 0
        # Sequences that run, and where those ended that drafts made end early: in steps since none
        # ran. Without drafts these would still run.
        self._running: set[DraftHistory] = set()
        self._ended: list[float] = []
        self._steps = 0.0
        self._peak = 1

    def history(self, tenant: int) -> DraftHistory:
        """The history of a sequence of ``tenant`` that begins."""
        known = self._tenants.pop(tenant, None) or Acceptance()
        self._tenants[tenant] = known
        if len(self._tenants) > TENANTS_MAX:
            del self._tenants[next(iter(self._tenants))]
        own = DraftHistory(known, lead=self._least_lead())
        self._running.add(own)
        self._peak = max(self._peak, len(self._running))
        return own

    def forget(self, own: DraftHistory) -> None:
        """A sequence ended or lost its slot."""
        self._running.discard(own)
        if not self._running:
            self._ended, self._steps, self._peak = [], 0.0, 1
        elif own.lead > self._least_lead():
            self._ended.append(self._steps + own.lead)

    def note_plain(self, running: int, seconds: float) -> None:
        """Note that a token of ``running`` sequences for which nothing is drafted took ``seconds``,
        from one result to the next: the host plans such steps while others are computed."""
        if not self._measures():
            seconds = 1.0
        elif seconds > 0:
            self._plain.setdefault(running, _Median()).add(seconds)
        self._steps += 1
        plain = self._plain_seconds(running)
        if plain is not None and not self._opened:
            self._opened, self._credit, self._together = True, *2 * (FIRST_CREDIT_STEPS * plain,)
        self._earn(TRIAL_TIME_SHARE * seconds, running)
        self._earn_together(TRIAL_TIME_SHARE * seconds + self._apart(running, running), running)
        self._unmeasured = 0
        self._undrafted += 1
        if self._undrafted >= FORGET_STEPS:
            self._undrafted = 0
            self._rounds.clear()

    def count(self, own: DraftHistory, running: int, most: int) -> int:
        """How many of at most ``most`` tokens to draft for a sequence, of ``running`` ones for
        which as many are drafted."""
        plain = self._plain_seconds(running)
        if plain is None or most <= 0:
            return 0
        debt, best = DEBT_STEPS * plain, self._best(own, running, most)
        # The account pays for a trial that could gain, whatever is expected.
        if own.rounds:
            least = -debt if best.gain >= 1.0 else 0.0
        else:
            trial = TRIAL_STEPS[bool(self._known(running))] * plain
            least = -debt if best.gain >= MIN_START_GAIN else trial
        credit = self._credit if running == 1 else min(self._credit, self._together)
        return best.drafts if best.most >= MIN_START_GAIN and credit >= least else 0

    def begins(self, own: DraftHistory, known: int, running: int, most: int) -> bool:
        """Whether to begin drafting for a sequence of ``known`` tokens."""
        if known < own.next_trial_at:
            return False
        worth = self.count(own, running, most) > 0
        if not worth and most > 0 and self._plain_seconds(running) is not None:
            own.next_trial_at = known + TRIAL_INTERVAL
            own.failed += self._best(own, running, most).gain < HOPELESS_GAIN
        return worth

    def rehearse(
        self, own: DraftHistory, tokens: NDArray[np.int32], draft: list[int], running: int
    ) -> bool:
        """Compare the drafts under rehearsal with a sequence's known ``tokens``, and continue with
        ``draft`` where they are compared. Whether rehearsed rounds saved enough to begin, or the
        account is full."""
        plain, known = self._plain_seconds(running), bool(self._known(running))
        if plain is None:
            return False
        if not self._measures():
            return True
        came, drafts, tenant = tokens[own.rehearsed_at :].tolist(), own.rehearsed, own.tenant
        same = [ours == theirs for ours, theirs in zip(drafts, came, strict=False)]
        if all(same) and len(came) < len(drafts):
            full = self._credit >= CREDIT_STEPS * plain
            return full or tenant.saved >= REHEARSED_STEPS[known] * running
        if drafts:
            right = [*same, False].index(False)
            own.compare(right, len(drafts))
            measured = self._seconds(running, len(drafts), plain) / plain
            cost = measured if known else REHEARSED_COST
            tenant.saved = max(0.0, tenant.saved + right + 1 - cost)
        own.rehearsed, own.rehearsed_at = draft, len(tokens)
        return False

    def give_up(self, own: DraftHistory, known: int) -> None:
        """Draft nothing for a while for a sequence of ``known`` tokens."""
        own.failed = 0 if own.balance > 0 else own.failed + 1
        own.next_trial_at = known + TRIAL_INTERVAL
        own.tenant.saved = 0.0
        own.interrupt()

    def follows(self, tenant: int, running: int, most: int) -> bool:
        """Whether what drafts for a new sequence shall read it: that takes time by itself."""
        self._followed += 1
        seldom = self._followed % TRIAL_INTERVAL == 1
        new = self._plain_seconds(running) is None
        known = self._tenants.get(tenant, Acceptance())
        return seldom or new or self.count(DraftHistory(known), running, most) > 0

    def given_up(self, own: DraftHistory) -> bool:
        """Whether so many trials failed that the drafter need not read a sequence any more."""
        return self._measures() and own.failed >= FAILED_TRIALS_MAX

    def note_round(
        self, drafted: int, drafting: int, running: int, seconds: float, *, first: bool
    ) -> None:
        """Note that a round took ``seconds`` in which ``drafting`` of ``running`` sequences had at
        most ``drafted`` drafts. The ``first`` one of a sequence computes what the drafter has not
        read yet. Then every sequence that had drafts is noted."""
        plain, self._share = self._plain_seconds(running), 0.0
        self._steps += 1
        self._undrafted = 0
        if plain is None:
            return
        expected, size = self._seconds(running, drafted, plain), (running, drafted)
        if not self._measures():
            seconds = expected
        # The first step of a size is lowered or compiled. Later ones that something else held up
        # count as a few times what is usual, once.
        latest = self._latest.get(size)
        usual = (
            FIRST_FACTOR * expected if latest is None else HELD_UP_FACTOR * max(expected, latest)
        )
        self._latest[size] = seconds
        others = (running - drafting) * plain / running
        self._share = (min(seconds, usual) - others) / drafting
        if not first and drafting == running:
            self._rounds.setdefault(running, {}).setdefault(drafted, _Median()).add(seconds)
        self._unmeasured += 1
        if self._unmeasured >= REMEASURE_ROUNDS:
            self._unmeasured = 0
            self._plain.clear()

    def note(self, own: DraftHistory, gained: int, running: int) -> None:
        """Note that a sequence of the round that was noted latest gained so many tokens."""
        own.lead += gained - 1
        plain = self._plain_seconds(running)
        if plain is None:
            return
        gain = gained * plain / running - self._share
        own.balance += gain
        self._earn(gain, running)
        together = gain if running > 1 else 0.0
        self._earn_together(together + self._apart(running, gained), running)

    def note_nothing(self, running: int, seconds: float) -> None:
        """Note that a step of ``running`` sequences waited ``seconds`` for drafts of one of them,
        and there were none: the prompt has none for the latest token, or a mask forbade them."""
        self._earn(-max(0.0, seconds), running)

    def _earn(self, seconds: float, running: int) -> None:
        plain = self._plain_seconds(running)
        if plain is not None:
            self._credit = min(CREDIT_STEPS * plain, self._credit + seconds)

    def _measures(self) -> bool:
        """Whether steps are measured at all: some engines have no clock."""
        return self._cost.total > 0

    def _plain_seconds(self, running: int) -> float | None:
        """Seconds of a token without drafts; None if that was not measured."""
        if not self._measures():
            return 1.0
        plain = self._plain.get(running)
        measured = plain is not None and len(plain.latest) >= MEASUREMENTS_MIN
        return plain.seconds if plain is not None and measured else None

    def _least_lead(self) -> float:
        return min([one.lead for one in self._running], default=0.0)

    def _earn_together(self, seconds: float, running: int) -> None:
        plain = self._plain_seconds(running)
        if plain is not None:
            self._together = min(TOGETHER_STEPS * plain, self._together + seconds)

    def _apart(self, running: int, tokens: float) -> float:
        """What ``tokens`` gain less because sequences ended early that would run without drafts."""
        if not self._ended:
            return 0.0
        reached = self._steps + self._least_lead()
        self._ended = [end for end in self._ended if end > reached]
        most = min(running + len(self._ended), self._peak)
        for count in range(most, running, -1):
            plain = self._plain_seconds(count)
            usual = self._plain_seconds(running)
            if plain is not None and usual is not None:
                return min(0.0, plain / count - usual / running) * tokens
        return 0.0

    def _best(self, own: DraftHistory, running: int, most: int) -> _Choice:
        """The number of drafts that makes a sequence fastest."""
        plain = self._plain_seconds(running)
        assert plain is not None
        longest = max(self._known(running), default=0)
        right = own.part_right if running == 1 else own.tenant_right
        best, tokens, next_right = _Choice(0, 0.0, 0.0), 1.0, 1.0
        could = 0.0
        for count in range(1, min(most, max(FIRST_DRAFTS, 2 * longest)) + 1):
            next_right *= right
            tokens += next_right
            part = plain / self._seconds(running, count, plain)
            could = max(could, (count + 1) * part)
            if tokens * part > best.gain:
                best = _Choice(count, tokens * part, could)
        return best._replace(most=could)

    def _known(self, running: int) -> list[int]:
        """The numbers of drafts of which rounds were measured."""
        measured = self._rounds.get(running, {})
        return [n for n, median in measured.items() if len(median.latest) >= ROUNDS_MIN]

    def _seconds(self, running: int, count: int, plain: float) -> float:
        """Expected seconds of a round with ``count`` drafts of each sequence: as measured, or by
        those of the nearest numbers that were, of drafts or of sequences."""
        rounds, known = self._rounds.get(running, {}), self._known(running)
        if count in known:
            return rounds[count].seconds
        if known:
            shorter = max((n for n in known if n < count), default=0)
            least = rounds[shorter].seconds if shorter else plain
            longer = min((n for n in known if n > count), default=None)
            if longer is None:
                return least * (1 + EXTRAPOLATED_COST * (count / shorter - 1))
            return max(least, plain + (rounds[longer].seconds - plain) * count / longer)
        others = [n for n in self._rounds if self._known(n) and self._plain_seconds(n)]
        if not others:
            return plain * (
                UNMEASURED_ROUND + UNMEASURED_DRAFT * math.pow(running, SEQUENCES_POWER) * count
            )
        near = min(others, key=lambda n: abs(n - running))
        usual = self._plain_seconds(near)
        assert usual is not None
        more = self._seconds(near, count, usual) - usual
        return plain + more * math.pow(running / near, SEQUENCES_POWER)
