"""How many tokens to draft for a sequence: as many as are worth the time that a round takes.

A round makes drafts and computes the step that verifies them. Each draft is right with some
probability, and the first wrong one ends what a round yields: with ``p`` right of all drafts, k of
them yield (1 - p^(k + 1)) / (1 - p) tokens on average. Rounds are measured as a whole and compared
with what as many tokens take without drafts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import field
from typing import NamedTuple

from contract.lazy_dataclass import dataclass
from reference.sched.cost import OUTLIER_FACTOR, Load, StepCost

FIRST_DRAFTS = 3
"""Most drafted tokens in a round until drafts were right, where nothing is measured."""
UNKNOWN_COST = 1.5
"""How many times as long a round is assumed to take as a plain step where nothing is measured."""
PAUSE_TOKENS = 32
"""For how many tokens nothing is drafted for a sequence after drafts were not worth their cost.
Each further failure doubles it."""
MOST_DOUBLINGS = 7
ASKED_TOKENS = 16
"""After so many tokens it is asked again whether to begin drafting for a sequence."""
MEMORY = 0.75
"""Weight of the earlier rounds against the newest one in the running mean of tokens per round."""
TRIAL_MEMORY = 0.95
"""Weight of a sequence's earlier drafts after each round."""
PAUSE_MEMORY = 0.3
"""Weight of a sequence's earlier drafts after a pause."""
COMMON_MEMORY = 0.99
"""The same for the drafts of all sequences."""
FIRST_RIGHT = 0.6
"""The part of drafts that are right, before any was compared."""
COMMON_TRIALS = 8.0
"""As how many of a sequence's own drafts the mean of all sequences counts."""
LEAST_GAIN = 1.05
"""Drafts are begun where they are expected to make a sequence faster by this factor, and go on
until they are expected to make it slower."""
WARM_ROUNDS = 2
"""The first rounds after steps without drafts are not measured: they compute what the drafter has
not read yet, and follow an emptied pipeline."""
WARM_FACTOR = 2.0
"""Each of them counts as lost time by at most this factor of what is expected."""
TRIAL_ROUNDS = WARM_ROUNDS + 3
"""After so many rounds a trial ends whose drafts are not worth it, unless its latest was right."""
TRIAL_MISSES = 2
"""A trial ends after so many rounds without a right draft."""
MEASURED = 3
"""The median of so many rounds or steps counts as measured."""
REMEMBERED = 9
"""The latest rounds or steps of which the median is taken."""
TRIED_PART = 0.01
"""The part of the time of plain steps that pays for trials."""
TRIED_STEPS = 4.0
"""How many plain steps' time trials may have lost and not paid for when one begins."""
TRIED_TOGETHER = 2
"""Trials of several sequences may lose that part of it, since each of their rounds shows more."""
MOST_LOST = 2.0
"""Drafts that lost more than this factor of it pause, whatever is expected of them."""
CREDIT_STEPS = 6.0
"""How many plain steps' time of earlier gains trials may use in addition."""
FIRST_RETRY = 64
"""Plain steps between a failed trial and the next. Each further failure doubles it."""
PLAIN_ROUNDS = 512
"""After so many rounds plain steps are measured again."""
ROW_PART = 0.25
"""The largest part of a plain step that a row is expected to add before it is measured."""
KNOWN_ROUNDS = 32
"""For how many rounds a prediction of what rows add to a step is used."""
TRIED_SEQUENCES = 16
"""One in so many sequences is read by the drafter where drafts are not worth it."""
GIVEN_UP = 3
"""After so many failed trials in a row the drafter stops reading a sequence."""


@dataclass(slots=True)
class AcceptedTokens:
    """What the rounds of one sequence yield. ``mean`` is the running mean of tokens per round, over
    ``steps`` rounds. ``right`` of ``compared`` drafts were right; old ones count less.
    ``forbidden``: a mask forbade the draft behind those of the latest round. ``rounds`` followed
    each other without a plain step and gained ``balance`` seconds; in the latest ``missed`` of them
    no draft was right. ``failed`` trials in a row gained nothing."""

    mean: float = 0.0
    steps: int = 0
    paused_until: int = 0
    right: float = 0.0
    compared: float = 0.0
    forbidden: bool = False
    rounds: int = 0
    balance: float = 0.0
    missed: int = 0
    failed: int = 0

    def note(self, tokens: int, drafted: int) -> None:
        """Note that a round with ``drafted`` tokens yielded ``tokens``, including the one that a
        plain step yields."""
        self.steps += 1
        self.rounds += 1
        self.missed = 0 if tokens > 1 else self.missed + 1
        weight = max(1 - MEMORY, 1 / self.steps)
        self.mean += (tokens - self.mean) * weight
        self.compare(tokens - 1, drafted, TRIAL_MEMORY)

    def compare(self, right: int, drafted: int, memory: float) -> None:
        """Note that the first ``right`` of so many drafts were right and the next one was not."""
        self.right = self.right * memory + right
        self.compared = self.compared * memory + right + (right < drafted)

    def pause(self, known: int) -> None:
        """Draft nothing for some tokens after the ``known`` ones; then begin a new mean."""
        self.paused_until = known + (PAUSE_TOKENS << min(max(0, self.failed - 1), MOST_DOUBLINGS))
        self.right *= PAUSE_MEMORY
        self.compared *= PAUSE_MEMORY
        self.mean, self.steps = 0.0, 0
        self.interrupt()

    def interrupt(self) -> None:
        """A plain step follows."""
        self.rounds, self.missed, self.balance = 0, 0, 0.0


@dataclass(slots=True)
class _Median:
    """The median of the latest durations, in seconds."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.latest.append(seconds)
        self.seconds = sorted(self.latest)[len(self.latest) // 2]

    @property
    def known(self) -> bool:
        return len(self.latest) >= MEASURED


class _Choice(NamedTuple):
    """A number of drafts, and by which factor it is expected to make a sequence faster."""

    drafts: int
    gain: float


class DraftPolicy:
    """Decides the number of drafts from how many were right and from what rounds were measured to
    take.

    Where nothing is measured a fixed rule holds. Drafts that are expected to gain nothing, and
    numbers of drafts that were not measured, are tried as long as trials have lost little.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._plain: dict[int, _Median] = {}
        self._rounds: dict[int, dict[int, _Median]] = {}
        self._added: dict[tuple[int, int], float] = {}
        self._all = AcceptedTokens()
        self._noted = self._unmeasured = self._asked = 0
        self._lost = self._retry_at = 0.0
        self._retry = FIRST_RETRY

    def note_plain(self, running: int, seconds: float) -> None:
        """Note that a token of ``running`` sequences for which nothing is drafted took ``seconds``,
        from one result to the next: the host plans such steps while others are computed."""
        self._plain.setdefault(running, _Median()).add(seconds)
        self._lost = max(min(self._lost, 0.0), self._lost - TRIED_PART * seconds)
        self._unmeasured = 0

    def count(self, own: AcceptedTokens, running: int, most: int) -> int:
        """How many of at most ``most`` tokens to draft for a sequence, of ``running`` ones for
        which as many are drafted."""
        if not self._measures():
            unworthy = own.steps >= 2 and own.mean < UNKNOWN_COST
            return 0 if unworthy else most if own.mean > FIRST_DRAFTS else min(most, FIRST_DRAFTS)
        alone = self._alone(running)
        if alone is None or most <= 0:
            return 0
        bound = TRIED_STEPS * alone / min(running, TRIED_TOGETHER)
        if self._lost > MOST_LOST * bound:
            return 0
        begun = own.rounds > 0 or self._cost.total >= self._retry_at
        tries = begun and self._lost <= bound
        best = self._best(own, running, most, tries)
        if running > 1 and (self._gain(running, most) or 1.0) < 1.0:
            # Drafts of a few sequences make the steps of the others longer.
            return 0
        if best.gain >= (1.0 if own.rounds > WARM_ROUNDS else LEAST_GAIN):
            return best.drafts
        goes_on = own.rounds < TRIAL_ROUNDS or not own.missed
        return best.drafts if tries and goes_on and own.missed < TRIAL_MISSES else 0

    def begins(self, own: AcceptedTokens, known: int, running: int, most: int) -> bool:
        """Whether to begin drafting for a sequence of ``known`` tokens."""
        if known < own.paused_until:
            return False
        due = self._cost.total >= self._retry_at
        if due and (self._gain(running, most) or LEAST_GAIN) < LEAST_GAIN:
            # Each trial measures anew.
            del self._rounds[running]
        worth = self.count(own, running, most) > 0
        if not worth and self._alone(running) is not None:
            own.paused_until = known + ASKED_TOKENS
        return worth

    def give_up(self, own: AcceptedTokens, known: int, running: int, most: int) -> None:
        """Draft nothing more for a sequence of ``known`` tokens until it is worth a trial."""
        alone = self._alone(running)
        if alone is None and self._measures():
            own.interrupt()
            return
        if alone is not None:
            own.failed = 0 if own.balance > 0 else own.failed + 1
        if own.balance > 0 or (self._gain(running, most) or 0.0) >= LEAST_GAIN:
            self._retry = FIRST_RETRY
        elif alone is not None and self._cost.total >= self._retry_at:
            self._retry_at = self._cost.total + self._retry * alone
            self._retry = min(2 * self._retry, FIRST_RETRY << MOST_DOUBLINGS)
        own.pause(known)

    def follows(self, running: int, most: int) -> bool:
        """Whether what drafts for a new sequence shall read it: that takes time by itself."""
        self._asked += 1
        worth = not self._measures() or not self._plain
        new = AcceptedTokens()
        return worth or self._asked % TRIED_SEQUENCES == 1 or self.count(new, running, most) > 0

    def given_up(self, own: AcceptedTokens) -> bool:
        """Whether so many trials failed that the drafter need not read a sequence any more."""
        return self._measures() and own.failed >= GIVEN_UP

    def note(
        self,
        own: AcceptedTokens,
        drafted: int,
        gained: int,
        running: int,
        seconds: float,
        drafting: int,
    ) -> None:
        """Note that a round with ``drafted`` tokens of a sequence yielded ``gained`` tokens and
        took ``seconds``. It was one of ``drafting`` sequences that had drafts, of ``running``."""
        self._all.compare(gained - 1, drafted, COMMON_MEMORY)
        alone = self._alone(running)
        if alone is None or seconds <= 0:
            return
        self._noted += 1
        if self._noted % KNOWN_ROUNDS == 0:
            self._added.clear()
        # A round that something else held up counts as a few times what is usual.
        held_up = OUTLIER_FACTOR if own.rounds > WARM_ROUNDS else WARM_FACTOR
        usual = min(seconds, held_up * self._seconds(running, drafted))
        others = (running - drafting) / max(1, drafting) * (usual - alone)
        lost = usual - gained * alone + others
        own.balance -= lost
        self._lost = max(-CREDIT_STEPS * alone, self._lost + lost / running)
        if own.rounds > WARM_ROUNDS and drafting == running:
            rounds = self._rounds.setdefault(running, {})
            rounds.setdefault(drafted, _Median()).add(seconds)
        self._unmeasured += 1
        if self._unmeasured >= PLAIN_ROUNDS * running:
            self._unmeasured = 0
            self._plain.clear()

    def note_forbidden(self, running: int, seconds: float) -> None:
        """Note that a mask forbade all drafts of one of ``running`` sequences, which took
        ``seconds`` to make."""
        self._all.compare(0, 1, COMMON_MEMORY)
        self._lost += max(0.0, seconds) / running

    def _measures(self) -> bool:
        """Whether steps are measured at all: some engines have no clock."""
        return self._cost.total > 0

    def _alone(self, running: int) -> float | None:
        """Seconds of a token without drafts; None where that was not measured."""
        own = self._plain.get(running)
        if own is not None and own.known:
            return own.seconds
        known = [other for other, median in self._plain.items() if median.known]
        if not known:
            return None
        nearest = min(known, key=lambda other: abs(other - running))
        here, there = (self._cost.predict(Load(n, 0)) for n in (running, nearest))
        return self._plain[nearest].seconds * (here / there if here and there else 1.0)

    def _best(self, own: AcceptedTokens, running: int, most: int, tries: bool) -> _Choice:
        """The number of drafts that makes a sequence fastest: of those measured, unless it
        ``tries`` others."""
        alone, right = self._alone(running), self._right(own)
        assert alone is not None
        rounds = self._rounds.get(running, {})
        best, tokens, next_right = _Choice(0, 0.0), 1.0, 1.0
        for count in range(1, most + 1):
            next_right *= right
            tokens += next_right
            if tries or (count in rounds and rounds[count].known):
                gain = tokens * alone / self._seconds(running, count)
                if gain > best.gain:
                    best = _Choice(count, gain)
        return best

    def _gain(self, running: int, most: int) -> float | None:
        """The factor that drafts are measured to gain for a new sequence; None where they were not
        measured."""
        if self._alone(running) is None or not self._measures():
            return None
        return self._best(AcceptedTokens(), running, most, False).gain or None

    def _right(self, own: AcceptedTokens) -> float:
        """The estimated part of a sequence's drafts that are right."""
        common = (self._all.right + FIRST_RIGHT) / (self._all.compared + 1)
        return (own.right + COMMON_TRIALS * common) / (own.compared + COMMON_TRIALS)

    def _seconds(self, running: int, count: int) -> float:
        """Expected seconds of a round with ``count`` drafts of each sequence: as measured, or that
        of a plain step, of the rows that the drafts add, and of what was measured in addition."""
        measured = self._rounds.get(running, {}).get(count)
        if measured is not None and measured.known:
            return measured.seconds
        alone = self._alone(running)
        assert alone is not None
        return alone + self._rows(running, count) + self._overhead(running, count)

    def _overhead(self, running: int, count: int) -> float:
        """Expected seconds that a round takes beyond a step of its rows. Part of that is fixed:
        more drafts than measured are expected to add nothing until they are measured too."""
        rounds = self._rounds.get(running)
        if rounds is None and self._rounds:
            running = min(self._rounds, key=lambda other: abs(other - running))
            rounds = self._rounds[running]
        alone = self._alone(running)
        known = sorted(n for n, median in (rounds or {}).items() if median.known)
        if rounds is None or alone is None or not known:
            return 0.0
        beyond = [rounds[n].seconds - alone - self._rows(running, n) for n in known]
        fewer = [n for n in range(len(known)) if known[n] < count]
        if not fewer:
            return max(0.0, beyond[0]) * (1 + count) / (1 + known[0])
        low = fewer[-1]
        high = low + 1 if low + 1 < len(known) else low
        if high == low:
            low = max(0, low - 1)
        slope = (beyond[high] - beyond[low]) / max(1, known[high] - known[low])
        return max(0.0, beyond[low] + max(0.0, slope) * (count - known[low]))

    def _rows(self, running: int, count: int) -> float:
        """Expected seconds that ``count`` rows more of each sequence add to a step. A few rows more
        than in any step are tried whatever is predicted: it may follow from one slow prompt."""
        if (running, count) not in self._added:
            base, more = (self._cost.predict(Load(running * rows, 0)) for rows in (1, 1 + count))
            self._added[running, count] = 0.0 if base is None or more is None else more - base
        alone = self._alone(running) or 0.0
        return min(self._added[running, count], ROW_PART * alone * running * count)
