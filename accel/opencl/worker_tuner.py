"""How many workers a step gets, chosen from how long steps took.

Beside other work every barrier may wait for a worker that has no core, so fewer workers can be
faster. Nothing tells from outside which number is best: now and then a few steps run with another
number, and the better one stays. Such a trial ends as soon as it has cost a step more than it had
to, its cost is paid back out of a small share of the time before the next one, and each that
changes nothing doubles the distance to the next. A lasting change of the usual step time brings
the next trial forward.

Nothing here asks a clock or a device: step times in, numbers of workers out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import field
from itertools import chain
from typing import Protocol

from contract.lazy_dataclass import dataclass

TRIAL_STEPS = 8
LONG_TRIAL_STEPS = 3 * TRIAL_STEPS
"""Of a trial that has saved something, but less than shows through what steps differ by anyway."""
FIRST_GAP = 3
MIN_GAP, MAX_GAP = 8, 256
"""Ordinary steps between two trials."""
MAX_GAP_DOWN = 1024
"""The same where only fewer workers are left to try: more than are good show by themselves."""
TRIAL_SHARE = 0.03
"""Of the time of ordinary steps, what trials may cost beyond it."""
TOO_MUCH = 0.75
"""Of an ordinary step, what a trial costs before it is given up."""
WORTH_CHANGING = 0.97
"""A trial must take less than this share of the usual time to win."""
LONG_MEAN = 1 / 32
"""Weight of a new step time in the long running mean."""
CHANGED = 1.25
"""Ratio of the last TRIAL_STEPS to the long mean that says the machine is no longer the same."""
BEYOND_SPREAD = 1.0
"""By how many times what steps usually differ from it they must differ, too: where each step takes
another time anyway, eight of them say little, and each of the trials they would bring forward is a
step that takes longer."""
SINGLE_SIZES = 8
"""Steps of up to so many tokens are told apart, larger ones by powers of two."""


@dataclass(slots=True)
class Trial:
    """Steps with another number of workers, against the ``usual`` seconds of one before."""

    workers: int
    usual: float
    submitted: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def saved(self) -> float:
        """Seconds less than usual so far; negative when it is slower."""
        return len(self.seconds) * self.usual - sum(self.seconds)

    @property
    def finished(self) -> bool:
        """There are steps enough to tell."""
        return len(self.seconds) >= self.steps

    @property
    def steps(self) -> int:
        """How many it takes: more where they save something."""
        long = len(self.seconds) >= TRIAL_STEPS and self.saved > 0
        return LONG_TRIAL_STEPS if long else TRIAL_STEPS

    @property
    def wants_another(self) -> bool:
        """One step goes ahead alone: the queue is not filled with what may be slow."""
        return self.submitted < min(self.steps, 1 + 2 * len(self.seconds))

    @property
    def won(self) -> bool:
        """It has saved a whole step, or a little on each."""
        faster = typical(self.seconds) < WORTH_CHANGING * self.usual
        return self.saved > self.usual or (len(self.seconds) >= TRIAL_STEPS and faster)

    @property
    def costly(self) -> bool:
        """It has cost too much."""
        return self.saved < -TOO_MUCH * self.usual

    @property
    def lost(self) -> bool:
        """It was costly, or ended without winning."""
        return self.costly or (self.finished and not self.won)


@dataclass(slots=True)
class WorkerTuner:
    """The number of workers, 1 to ``most``, for steps of one size, and what is known of them.

    ``workers`` is in use; ``pending`` are the numbers to try before any is tried again. ``spread``
    is how far steps lie from ``long_mean``, on average; a hiccup counts as no more than the mean.
    """

    most: int
    workers: int
    pending: list[int] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=TRIAL_STEPS))
    long_mean: float = 0.0
    spread: float = 0.0
    gap: int = FIRST_GAP
    waited: int = 0
    debt: float = 0.0
    trial: Trial | None = None

    def choose(self) -> int:
        """Workers of the next step."""
        if self.trial is None and self.most > 1 and self.waited >= self.gap and self.debt <= 0:
            self.trial = Trial(self._next(), typical(self.recent))
        if self.trial is not None and self.trial.wants_another:
            self.trial.submitted += 1
            return self.trial.workers
        return self.workers

    def note(self, workers: int, seconds: float) -> None:
        """A step with ``workers`` took ``seconds``. Steps may be chosen before earlier ones end."""
        trial = self.trial
        if trial is not None and workers == trial.workers:
            trial.seconds.append(seconds)
            if trial.won:
                self._adopt(trial)
            elif trial.lost:
                self._reject(trial)
        elif workers == self.workers:
            self._note_usual(seconds)

    def _note_usual(self, seconds: float) -> None:
        # The first step of all finds cold caches, so that the long mean begins with the second.
        known = len(self.recent) > 1
        self.recent.append(seconds)
        if known:
            off = min(abs(seconds - self.long_mean), self.long_mean)
            self.spread += LONG_MEAN * (off - self.spread)
        self.long_mean += (LONG_MEAN if known else 1.0) * (seconds - self.long_mean)
        if self.trial is not None:
            return
        self.waited += 1
        self.debt = max(0.0, self.debt - TRIAL_SHARE * seconds)
        now = typical(self.recent)
        slower, faster = now > CHANGED * self.long_mean, self.long_mean > CHANGED * now
        if (slower or faster) and abs(now - self.long_mean) > BEYOND_SPREAD * self.spread:
            self.long_mean = now
            self._look_again(downward=slower)

    def _look_again(self, downward: bool) -> None:
        """The machine has changed: a trial soon, and on that side."""
        if self.workers == (1 if downward else self.most):
            return
        self.gap = MIN_GAP
        self.pending = candidates(self.workers, self.most, downward)
        if downward:
            self.debt = 0.0

    def _adopt(self, trial: Trial) -> None:
        downward = trial.workers < self.workers
        self.workers = trial.workers
        self.pending = candidates(self.workers, self.most, downward)
        self.recent = deque(trial.seconds, maxlen=TRIAL_STEPS)
        self.long_mean = typical(trial.seconds)
        self._rest(MIN_GAP)

    def _reject(self, trial: Trial) -> None:
        self.debt += max(0.0, -trial.saved)
        self.pending.remove(trial.workers)
        if trial.costly:
            # What is farther off on that side is no better.
            self.pending = [n for n in self.pending if not between(self.workers, trial.workers, n)]
        # A trial of fewer is soon, too, where one of more waits behind it.
        fewer_alone = max(self._next(), *self.pending) < self.workers
        limit = MAX_GAP_DOWN if fewer_alone else MAX_GAP
        self._rest(min(limit, max(MIN_GAP, (4 if trial.costly else 2) * self.gap)))

    def _rest(self, gap: int) -> None:
        self.trial = None
        self.waited = 0
        self.gap = gap

    def _next(self) -> int:
        """The number to try next."""
        if not self.pending:
            self.pending = candidates(self.workers, self.most, downward=True)
        return self.pending[0]


class Choice(Protocol):
    """Who says how many workers a step gets."""

    def choose(self, tokens: int) -> int:
        """Workers of the next step, which computes ``tokens``."""

    def note(self, tokens: int, workers: int, seconds: float) -> None:
        """A step of ``tokens`` that ``workers`` computed took ``seconds`` on the device."""


@dataclass(frozen=True, slots=True)
class FixedWorkers:
    """Always the same number."""

    workers: int

    def choose(self, tokens: int) -> int:
        """See Choice."""
        return self.workers

    def note(self, tokens: int, workers: int, seconds: float) -> None:
        """See Choice."""


@dataclass(slots=True)
class Crews:
    """One Crew for every size of step. A new one begins as the last one stands."""

    most: int
    by_size: dict[int, WorkerTuner] = field(default_factory=dict)
    workers: int = 0

    def choose(self, tokens: int) -> int:
        """See Choice; 1 to ``most``."""
        size = size_class(tokens)
        if size not in self.by_size:
            self.by_size[size] = WorkerTuner(self.most, self.workers or self.most)
        worker_tuner = self.by_size[size]
        chosen = worker_tuner.choose()
        self.workers = worker_tuner.workers
        return chosen

    def note(self, tokens: int, workers: int, seconds: float) -> None:
        """See Choice."""
        self.by_size[size_class(tokens)].note(workers, seconds / max(1, tokens))


def candidates(workers: int, most: int, downward: bool) -> list[int]:
    """Other numbers worth a trial, far ones first, smaller and larger in turn.

    Halves down to one, and doubles up to ``most``; then what refines the number in use. The first
    is smaller if ``downward``, as far as there is one.
    """
    bits = range(1, most.bit_length() + 1)
    fewer = [max(1, workers >> bit) for bit in bits] + [workers - (workers >> bit) for bit in bits]
    more = [min(most, workers << bit) for bit in bits] + [
        workers + (workers >> bit) for bit in bits
    ]
    sides = ([*fewer, workers - 1], [*more, workers + 1])
    in_turn = chain.from_iterable(zip(*(sides if downward else sides[::-1]), strict=True))
    return [n for n in dict.fromkeys(in_turn) if 1 <= n <= most and n != workers]


def between(first: int, middle: int, last: int) -> bool:
    """Whether ``middle`` lies on the way from ``first`` to ``last``."""
    return first < middle < last or first > middle > last


def typical(seconds: Collection[float]) -> float:
    """The mean of step times but for the slowest quarter of them: hiccups say nothing."""
    kept = sorted(seconds)[: max(1, len(seconds) - (len(seconds) + 2) // 4)]
    return sum(kept) / len(kept)


def size_class(tokens: int) -> int:
    """Steps of one class take about the same time a token."""
    return tokens if tokens <= SINGLE_SIZES else SINGLE_SIZES + tokens.bit_length()
