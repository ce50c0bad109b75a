"""How many tokens to draft for a sequence: as many as are worth the time that their rows take.

Each draft is right with some probability, and the first wrong one ends what a step gains. With
``p`` right of all drafts, k of them give (1 - p^(k + 1)) / (1 - p) tokens a step on average. The
step takes longer by k rows of every running sequence, and by what making k drafts takes.
"""

from __future__ import annotations

from contract.lazy_dataclass import dataclass
from reference.sched.cost import OUTLIER_FACTOR, Load, StepCost

FIRST_DRAFTS = 3
"""Most drafted tokens in a step until drafts were right, where steps were not measured."""
UNKNOWN_COST = 1.5
"""How many times as long a step with drafts is assumed to be before there are measurements."""
PAUSE_TOKENS = 32
"""For how many tokens nothing is drafted for a sequence after drafts were not worth their cost."""
MEMORY = 0.75
"""Weight of the earlier steps against the newest one in the running mean of tokens per step."""
TRIAL_MEMORY = 0.95
"""Weight of a sequence's earlier drafts after each step with drafts."""
COMMON_MEMORY = 0.99
"""The same for the drafts of all sequences."""
FIRST_RIGHT = 0.6
"""The part of drafts that are right, before any was compared."""
COMMON_TRIALS = 4.0
"""As how many of a sequence's own drafts the mean of all sequences counts."""
LEAST_GAIN = 1.05
"""Drafts are worth it where they are expected to make a sequence faster by this factor."""
TRIED_PART = 0.01
"""The part of all steps' time that drafts may lose while they are only tried."""
TRIED_STEPS = 4.0
"""How many steps' time drafts may lose in addition: those of the first trials."""
TRIED_SEQUENCES = 16
"""One in so many sequences is drafted for where the others' drafts are not worth it."""
ENOUGH_COMPARED = 8.0
"""After so many compared drafts a sequence's drafts that are not worth it are given up."""
DRAFT_STEPS = 16
"""Over how many steps the time of making a draft is averaged."""


@dataclass(slots=True)
class AcceptedTokens:
    """How many tokens the steps with drafts of one sequence yield, as a running mean. ``right`` of
    ``compared`` drafts were right; old ones count less. ``forbidden``: a mask forbade the draft
    behind those of the latest step."""

    mean: float = 0.0
    steps: int = 0
    paused_until: int = 0
    right: float = 0.0
    compared: float = 0.0
    forbidden: bool = False

    def note(self, tokens: int, drafted: int) -> None:
        """Note that a step with ``drafted`` tokens yielded ``tokens``, including the one it yields
        without drafts."""
        self.steps += 1
        weight = max(1 - MEMORY, 1 / self.steps)
        self.mean += (tokens - self.mean) * weight
        self.compare(tokens - 1, drafted, TRIAL_MEMORY)

    def compare(self, right: int, drafted: int, memory: float) -> None:
        """Note that the first ``right`` of so many drafts were right and the next one was not."""
        self.right = self.right * memory + right
        self.compared = self.compared * memory + right + (right < drafted)

    def pause(self, known: int) -> None:
        """Draft nothing before there are PAUSE_TOKENS more tokens; then begin a new mean."""
        self.paused_until = known + PAUSE_TOKENS
        self.mean, self.steps = 0.0, 0


class DraftPolicy:
    """Decides the number of drafts from how many were right and from what steps were measured to
    take.

    Where nothing was measured a fixed rule holds. Drafts that are expected to gain nothing are
    tried again from time to time, as long as all trials lost at most TRIED_PART of the time.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._all = AcceptedTokens()
        self._draft_seconds = 0.0
        self._timed = 0
        self._asked = 0
        self._lost = 0.0

    def count(self, own: AcceptedTokens, running: int, most: int) -> int:
        """How many of at most ``most`` tokens to draft for a sequence, of ``running`` ones for
        which as many are drafted."""
        alone, best = self._seconds(running, 0), self._best(own, running, most)
        if alone is None:
            unworthy = own.steps >= 2 and own.mean < UNKNOWN_COST
            return 0 if unworthy else most if own.mean > FIRST_DRAFTS else min(most, FIRST_DRAFTS)
        if best:
            return best
        tried = self._lost <= TRIED_PART * self._cost.total + TRIED_STEPS * alone
        return min(most, 1) if tried else 0

    def follows(self, running: int, most: int) -> bool:
        """Whether what drafts for a new sequence shall read it: that takes time by itself."""
        self._asked += 1
        worth = self._best(AcceptedTokens(), running, most) or self._seconds(running, 0) is None
        return bool(worth) or self._asked % TRIED_SEQUENCES == 1

    def given_up(self, own: AcceptedTokens, running: int, most: int) -> bool:
        """Whether enough is known of a sequence to draft nothing for it any more."""
        unknown = self._seconds(running, 0) is None or own.compared < ENOUGH_COMPARED
        return not unknown and not self._best(own, running, most)

    def _best(self, own: AcceptedTokens, running: int, most: int) -> int:
        """The number of drafts that makes a sequence fastest; 0 where none is worth it or nothing
        was measured."""
        alone = self._seconds(running, 0)
        if alone is None:
            return 0
        gains = {n: self._rate(own, running, n) * alone for n in range(1, most + 1)}
        best = max(gains, key=gains.__getitem__, default=0)
        return best if best and gains[best] >= LEAST_GAIN else 0

    def note(self, drafted: int, gained: int, running: int, seconds: float) -> None:
        """Note that a step with ``drafted`` tokens of a sequence yielded ``gained`` tokens, and
        took ``seconds`` together with its drafting. It was one of ``running`` sequences."""
        self._all.compare(gained - 1, drafted, COMMON_MEMORY)
        alone, step = self._seconds(running, 0), self._step(running, drafted)
        if alone is None or step is None or seconds <= 0:
            return
        # A step that something else held up counts as a few times what is usual.
        usual = max(self._draft_seconds, alone / OUTLIER_FACTOR)
        each = min(max(0.0, seconds - step) / drafted, OUTLIER_FACTOR * usual)
        if OUTLIER_FACTOR * each < self._draft_seconds:
            # All before were held up, as the first ones are by kernels that are built for them.
            self._timed = 0
        self._timed = min(self._timed + 1, DRAFT_STEPS)
        seconds = min(seconds, step + drafted * each)
        self._draft_seconds += (each - self._draft_seconds) / self._timed
        self._lost = max(0.0, self._lost + (seconds - gained * alone) / running)

    def note_forbidden(self, running: int, seconds: float) -> None:
        """Note that a mask forbade all drafts of one of ``running`` sequences, which took
        ``seconds`` to make."""
        self._all.compare(0, 1, COMMON_MEMORY)
        self._lost += max(0.0, seconds) / running

    def _right(self, own: AcceptedTokens) -> float:
        """The estimated part of a sequence's drafts that are right."""
        common = (self._all.right + FIRST_RIGHT) / (self._all.compared + 1)
        return (own.right + COMMON_TRIALS * common) / (own.compared + COMMON_TRIALS)

    def _rate(self, own: AcceptedTokens, running: int, count: int) -> float:
        """Expected tokens a second of a sequence with ``count`` drafts in each step."""
        right, seconds = self._right(own), self._seconds(running, count)
        assert seconds is not None
        return sum(right**n for n in range(count + 1)) / seconds

    def _seconds(self, running: int, count: int) -> float | None:
        """Expected seconds of a step with ``count`` drafts of each sequence, and of making them."""
        step = self._step(running, count)
        return None if step is None else step + count * self._draft_seconds

    def _step(self, running: int, count: int) -> float | None:
        """Expected seconds of a step with ``count`` drafts of each sequence; None where unknown."""
        seconds = self._cost.predict(Load(running * (1 + count), 0))
        return seconds if seconds is not None and seconds > 0 else None
