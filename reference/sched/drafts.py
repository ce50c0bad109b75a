"""Choose the number of tokens to draft: the number that is fastest, and none where drafts lose.

A round makes drafts and computes the step that verifies them. With a part p of all drafts right, k
of them yield 1 + p + ... + p^k tokens on average. Rounds are measured as a whole and compared with
what as many tokens take without drafts.

An account keeps the loss small. What a round takes longer than plain steps is paid from it, and
plain steps earn a little of their time. Drafts end when it is overdrawn by a few plain steps.

Drafts that take no time, those from the prompt, are rehearsed first: compared with the tokens that
plain steps sample, while steps are still submitted ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from contract.lazy_dataclass import dataclass
from reference.sched.cost import OUTLIER_FACTOR, StepCost

TRIAL_TIME_SHARE = 0.008
"""The part of the time of plain steps that trials may lose."""
CREDIT_STEPS = 7.0
"""The most plain steps that the account has, and by which it may be overdrawn."""
MIN_START_GAIN = 1.05
"""Drafts begin where they are expected to make a sequence faster by this factor, and go on until
they are expected to make it slower."""
EXTRA_SEQUENCE_COST = 0.05
"""Which part of a round's time counts in addition for each further sequence: with drafts they end
at different times, and steps of those that are left have fewer tokens."""
FIRST_DRAFTS = 3
"""Most drafted tokens in a round until a round was measured; then twice those of the longest."""
DECAY = 0.97
"""Weight of earlier drafts after each round in the part of drafts that are right."""
COMMON_TRIALS = 8.0
"""As how many of a sequence's own drafts the mean of all sequences counts."""
PRIOR_ACCEPTED = 4.0
"""So many right drafts and a wrong one count in front of those of all sequences."""
MEASUREMENTS_MIN = 3
"""The median of so many rounds or steps counts as measured; at most three times as many are
remembered."""
UNMEASURED_COST = 1.2
"""Assumed time of a round of one sequence over that of a plain step, until one was measured; it is
more where more sequences run."""
EXTRAPOLATED_COST = 0.5
"""Which part of the time of a measured draft each one takes that makes the round longer than any
measured one."""
REHEARSED_COST = 2.0
"""Assumed time of a rehearsed round in plain steps, until one was measured."""
REHEARSED_STEPS = {False: 24.0, True: 1.0}
"""How many plain steps rehearsed rounds must save before drafts begin, for each sequence that runs,
by whether rounds were measured: the first one of each size is lowered or compiled."""
REMEASURE_ROUNDS = 512
"""After so many rounds plain steps are measured again."""
TRIAL_INTERVAL = 16
"""Where drafts are not worth it, one in so many sequences is read by the drafter, and every so many
tokens it is asked again whether they are."""
FAILED_TRIALS_MAX = 3
"""After so many failed trials in a row the drafter stops reading a sequence, which costs time."""


@dataclass(slots=True)
class DraftHistory:
    """How the rounds of one sequence went. ``right`` of ``compared`` drafts were right; old ones
    count less. ``forbidden``: a mask forbade the draft behind those of the latest round. ``rounds``
    followed each other without a plain step and gained ``balance`` seconds. ``failed`` trials in a
    row gained nothing or were not begun; the next one begins at token ``next_trial_at`` or later.
    Rehearsed rounds would have saved ``saved`` plain steps; ``rehearsed`` are the drafts of one
    that began when ``rehearsed_at`` tokens were known."""

    right: float = 0.0
    compared: float = 0.0
    forbidden: bool = False
    rounds: int = 0
    balance: float = 0.0
    failed: int = 0
    next_trial_at: int = 0
    saved: float = 0.0
    rehearsed: list[int] = field(default_factory=list)
    rehearsed_at: int = 0

    def compare(self, right: int, drafted: int) -> None:
        """Note that the first ``right`` of so many drafts were right and the next one was not."""
        self.right = self.right * DECAY + right
        self.compared = self.compared * DECAY + right + (right < drafted)

    def note(self, tokens: int, drafted: int) -> None:
        """Note that a round with ``drafted`` tokens yielded ``tokens``, including the one that a
        plain step yields."""
        self.rounds += 1
        self.rehearsed = []
        self.compare(tokens - 1, drafted)

    def interrupt(self) -> None:
        """A plain step follows."""
        self.rounds, self.balance = 0, 0.0


@dataclass(slots=True)
class _Median:
    """The median of the latest durations, in seconds."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=3 * MEASUREMENTS_MIN))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.latest.append(seconds)
        self.seconds = sorted(self.latest)[len(self.latest) // 2]

    @property
    def known(self) -> bool:
        return len(self.latest) >= MEASUREMENTS_MIN


class _Choice(NamedTuple):
    """A number of drafts, and by which factor it is expected to make a sequence faster."""

    drafts: int
    gain: float


class DraftPolicy:
    """Decides the number of drafts from how many were right and from what rounds take."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._plain: dict[int, _Median] = {}
        self._rounds: dict[int, dict[int, _Median]] = {}
        self._all = DraftHistory()
        self._latest: dict[tuple[int, int], tuple[int, float]] = {}
        self._credit = 0.0
        self._followed = self._unmeasured = 0

    def note_plain(self, running: int, seconds: float) -> None:
        """Note that a token of ``running`` sequences for which nothing is drafted took ``seconds``,
        from one result to the next: the host plans such steps while others are computed."""
        if not self._measures():
            seconds = 1.0
        elif seconds > 0:
            self._plain.setdefault(running, _Median()).add(seconds)
        self._earn(TRIAL_TIME_SHARE * seconds, running)
        self._unmeasured = 0

    def count(self, own: DraftHistory, running: int, most: int) -> int:
        """How many of at most ``most`` tokens to draft for a sequence, of ``running`` ones for
        which as many are drafted."""
        plain = self._plain_seconds(running)
        if plain is None or most <= 0:
            return 0
        limit, best = CREDIT_STEPS * plain, self._best(own, running, most)
        # With a plain step the account pays for a trial, whatever is expected of it.
        if own.rounds:
            least = -limit if best.gain >= 1.0 else 0.0
        else:
            least = -limit if best.gain >= MIN_START_GAIN else plain
        return best.drafts if self._credit >= least else 0

    def begins(self, own: DraftHistory, known: int, running: int, most: int) -> bool:
        """Whether to begin drafting for a sequence of ``known`` tokens."""
        if known < own.next_trial_at:
            return False
        worth = self.count(own, running, most) > 0
        if not worth and self._plain_seconds(running) is not None:
            own.next_trial_at = known + TRIAL_INTERVAL
            own.failed += 1
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
        came, drafts = tokens[own.rehearsed_at :].tolist(), own.rehearsed
        same = [ours == theirs for ours, theirs in zip(drafts, came, strict=False)]
        if all(same) and len(came) < len(drafts):
            full = self._credit >= CREDIT_STEPS * plain
            return full or own.saved >= REHEARSED_STEPS[known] * running
        if drafts:
            right = [*same, False].index(False)
            own.compare(right, len(drafts))
            self._all.compare(right, len(drafts))
            measured = self._seconds(running, len(drafts), plain) / plain
            cost = measured if known else REHEARSED_COST
            own.saved = max(0.0, own.saved + right + 1 - cost)
        own.rehearsed, own.rehearsed_at = draft, len(tokens)
        return False

    def give_up(self, own: DraftHistory, known: int) -> None:
        """Draft nothing for a while for a sequence of ``known`` tokens."""
        own.failed = 0 if own.balance > 0 else own.failed + 1
        own.next_trial_at = known + TRIAL_INTERVAL
        own.saved = 0.0
        own.interrupt()

    def follows(self, running: int, most: int) -> bool:
        """Whether what drafts for a new sequence shall read it: that takes time by itself."""
        self._followed += 1
        seldom = self._followed % TRIAL_INTERVAL == 1
        new = self._plain_seconds(running) is None
        return seldom or new or self.count(DraftHistory(), running, most) > 0

    def given_up(self, own: DraftHistory) -> bool:
        """Whether so many trials failed that the drafter need not read a sequence any more."""
        return self._measures() and own.failed >= FAILED_TRIALS_MAX

    def note(
        self,
        own: DraftHistory,
        drafted: int,
        gained: int,
        running: int,
        seconds: float,
        drafting: int,
    ) -> None:
        """Note that a round with ``drafted`` tokens of a sequence yielded ``gained`` tokens and
        took ``seconds``. It was one of ``drafting`` sequences that had drafts, of ``running``."""
        self._all.compare(gained - 1, drafted)
        plain, drafting = self._plain_seconds(running), max(1, drafting)
        if plain is None:
            return
        expected = self._seconds(running, drafted, plain)
        if not self._measures():
            seconds = expected
        tokens = gained * drafting + running - drafting
        # The first step of a size, which all its sequences note, is lowered or compiled. Later
        # rounds that something else held up count as a few times what is usual, once.
        size = running, drafted
        noted, latest = self._latest.get(size, (0, 0.0))
        usual = expected if noted < drafting else OUTLIER_FACTOR * max(expected, latest)
        self._latest[size] = noted + 1, seconds
        taken = min(seconds, usual) * self._later(running)
        gain = (tokens / running * plain - taken) / drafting
        own.balance += gain
        self._earn(gain, running)
        # The first round computes what the drafter has not read yet.
        if own.rounds > 1 and drafting == running:
            self._rounds.setdefault(running, {}).setdefault(drafted, _Median()).add(seconds)
        self._unmeasured += 1
        if self._unmeasured >= REMEASURE_ROUNDS * running:
            self._unmeasured = 0
            self._plain.clear()

    def note_nothing(self, running: int, seconds: float) -> None:
        """Note that a step of ``running`` sequences waited ``seconds`` for drafts of one of them,
        and there were none: the prompt has none for the latest token, or a mask forbade them."""
        self._earn(-max(0.0, seconds) / running, running)

    def _earn(self, seconds: float, running: int) -> None:
        plain = self._plain_seconds(running)
        if plain is not None:
            self._credit = min(CREDIT_STEPS * plain, self._credit + seconds)

    def _measures(self) -> bool:
        """Whether steps are measured at all: some engines have no clock."""
        return self._cost.total > 0

    def _plain_seconds(self, running: int) -> float | None:
        """Seconds of a token without drafts; None where that was not measured."""
        if not self._measures():
            return 1.0
        plain = self._plain.get(running)
        return None if plain is None or not plain.known else plain.seconds

    def _best(self, own: DraftHistory, running: int, most: int) -> _Choice:
        """The number of drafts that makes a sequence fastest."""
        plain = self._plain_seconds(running)
        assert plain is not None
        longest = max(self._known(running), default=0)
        best, tokens, next_right, right = _Choice(0, 0.0), 1.0, 1.0, self._right(own)
        for count in range(1, min(most, max(FIRST_DRAFTS, 2 * longest)) + 1):
            next_right *= right
            tokens += next_right
            gain = tokens * plain / self._seconds(running, count, plain) / self._later(running)
            if gain > best.gain:
                best = _Choice(count, gain)
        return best

    def _later(self, running: int) -> float:
        return 1 + EXTRA_SEQUENCE_COST * (running - 1)

    def _right(self, own: DraftHistory) -> float:
        """The estimated part of a sequence's drafts that are right."""
        common = (self._all.right + PRIOR_ACCEPTED) / (self._all.compared + PRIOR_ACCEPTED + 1)
        return (own.right + COMMON_TRIALS * common) / (own.compared + COMMON_TRIALS)

    def _known(self, running: int) -> list[int]:
        """The numbers of drafts of which rounds were measured."""
        return [n for n, median in self._rounds.get(running, {}).items() if median.known]

    def _seconds(self, running: int, count: int, plain: float) -> float:
        """Expected seconds of a round with ``count`` drafts of each sequence: as measured, or by
        those of the nearest numbers that were."""
        rounds, known = self._rounds.get(running, {}), self._known(running)
        if not known:
            return UNMEASURED_COST * self._later(running) * plain
        if count in known:
            return rounds[count].seconds
        shorter = max((n for n in known if n < count), default=0)
        least = rounds[shorter].seconds if shorter else plain
        longer = min((n for n in known if n > count), default=None)
        if longer is None:
            return least * (1 + EXTRAPOLATED_COST * (count / shorter - 1))
        return max(least, plain + (rounds[longer].seconds - plain) * count / longer)
