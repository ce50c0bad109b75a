"""Chooses the number of workers of a step from the times of earlier steps.

If other processes use the cores, every barrier may wait for a worker that has no core, so fewer
workers can be faster. The best number is found by trials: from time to time a few steps run with
another number, and the faster number is kept. A trial ends once it has cost about one step. The
cost of trials is limited to a small share of the time between them, and each trial that changes
nothing doubles the distance to the next. A lasting change of the step time starts the next trial
early.

This module reads no clock and no device: step times go in, numbers of workers come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import field
from itertools import chain
from typing import Protocol

from contract.lazy_dataclass import dataclass

TRIAL_STEPS = 8
LONG_TRIAL_STEPS = 3 * TRIAL_STEPS
"""Steps of a trial that saves time, but less than step times usually vary."""
FIRST_GAP = 3
MIN_GAP, MAX_GAP = 8, 256
"""Ordinary steps between two trials."""
MAX_GAP_DOWN = 1024
"""The same if only fewer workers are left to try; slower steps start such a trial earlier."""
TRIAL_SHARE = 0.03
"""Most time that trials may cost, as a share of the time of ordinary steps."""
TOO_MUCH = 0.75
"""A trial ends once it has cost this share of an ordinary step."""
WORTH_CHANGING = 0.97
"""A trial wins if its steps take less than this share of the usual time."""
LONG_MEAN = 1 / 32
"""Weight of a new step time in the long running mean."""
CHANGED = 1.25
"""The step time has changed if the mean of the last TRIAL_STEPS and the long mean differ by this
ratio."""
BEYOND_SPREAD = 1.0
"""A change must also exceed this many times the usual spread of step times: if step times vary
anyway, eight of them prove little, and the trial they start costs a slower step."""
SINGLE_SIZES = 8
"""Up to this many tokens each size is a class; larger ones are classed by powers of two."""


@dataclass(slots=True)
class Trial:
    """Steps with another number of ``workers``, compared with ``usual``, the seconds of a step
    before. ``submitted`` counts its steps, ``seconds`` are the times of those that have ended."""

    workers: int
    usual: float
    submitted: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def saved(self) -> float:
        """Seconds it has saved so far; negative when it is slower."""
        return len(self.seconds) * self.usual - sum(self.seconds)

    @property
    def finished(self) -> bool:
        """Whether it has all its steps."""
        return len(self.seconds) >= self.steps

    @property
    def steps(self) -> int:
        """The number of its steps: more where they save time."""
        long = len(self.seconds) >= TRIAL_STEPS and self.saved > 0
        return LONG_TRIAL_STEPS if long else TRIAL_STEPS

    @property
    def takes_next(self) -> bool:
        """Whether the next step belongs to it. The second step waits until the first has ended,
        since it may be slow."""
        return self.submitted < min(self.steps, 1 + 2 * len(self.seconds))

    @property
    def won(self) -> bool:
        """Whether it has saved a whole step, or a little on each step."""
        faster = typical(self.seconds) < WORTH_CHANGING * self.usual
        return self.saved > self.usual or (len(self.seconds) >= TRIAL_STEPS and faster)

    @property
    def costly(self) -> bool:
        """Whether it has already cost too much."""
        return self.saved < -TOO_MUCH * self.usual

    @property
    def lost(self) -> bool:
        """Whether it was costly, or ended without winning."""
        return self.costly or (self.finished and not self.won)


@dataclass(slots=True)
class WorkerTuner:
    """Chooses the number of workers, 1 to ``max_workers``, for steps of one size.

    ``workers`` is in use; ``pending`` are the numbers to try before any is tried again. ``recent``
    are the last step times in seconds, ``long_mean`` is their running mean, ``spread`` the mean
    distance from it, each distance limited to the mean. The next trial starts once ``waited``
    ordinary steps have reached ``gap`` and the trials' share of their time has paid ``debt``, the
    seconds that failed trials have cost."""

    max_workers: int
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
        ready = self.waited >= self.gap and self.debt <= 0 and self.max_workers > 1
        if self.trial is None and ready:
            self.trial = Trial(self._next(), typical(self.recent))
        if self.trial is not None and self.trial.takes_next:
            self.trial.submitted += 1
            return self.trial.workers
        return self.workers

    def note(self, workers: int, seconds: float) -> None:
        """Record that a step with ``workers`` took ``seconds``; later ones may be chosen
        already."""
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
        # The very first step has cold caches, so the long mean begins with the second.
        known = len(self.recent) > 1
        self.recent.append(seconds)
        if known:
            distance = min(abs(seconds - self.long_mean), self.long_mean)
            self.spread += LONG_MEAN * (distance - self.spread)
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
        """Start a trial soon, with fewer workers if ``downward``, else with more."""
        if self.workers == (1 if downward else self.max_workers):
            return
        self.gap = MIN_GAP
        self.pending = candidates(self.workers, self.max_workers, downward)
        if downward:
            self.debt = 0.0

    def _adopt(self, trial: Trial) -> None:
        downward = trial.workers < self.workers
        self.workers = trial.workers
        self.pending = candidates(self.workers, self.max_workers, downward)
        self.recent = deque(trial.seconds, maxlen=TRIAL_STEPS)
        self.long_mean = typical(trial.seconds)
        self._rest(MIN_GAP)

    def _reject(self, trial: Trial) -> None:
        self.debt += max(0.0, -trial.saved)
        self.pending.remove(trial.workers)
        if trial.costly:
            # Numbers farther away in that direction are no better.
            self.pending = [n for n in self.pending if not between(self.workers, trial.workers, n)]
        # A trial with fewer workers also comes soon if one with more workers follows it.
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
            self.pending = candidates(self.workers, self.max_workers, downward=True)
        return self.pending[0]


class WorkerChoice(Protocol):
    """Chooses how many workers a step gets."""

    def choose(self, tokens: int, ops: int) -> int:
        """The number of workers of the next step, which has ``ops`` ops and computes ``tokens``."""

    def note(self, tokens: int, ops: int, workers: int, seconds: float) -> None:
        """Note that a step of that size with ``workers`` took ``seconds`` on the device."""


@dataclass(frozen=True, slots=True)
class FixedWorkers:
    """The same number of workers for every step."""

    workers: int

    def choose(self, tokens: int, ops: int) -> int:
        return self.workers

    def note(self, tokens: int, ops: int, workers: int, seconds: float) -> None:
        """See WorkerChoice."""


@dataclass(slots=True)
class AdaptiveWorkers:
    """Chooses with a WorkerTuner for each size of steps.

    ``max_workers`` is the largest number it chooses. ``by_size`` has the tuners by number of ops,
    which identifies the graph, and ``size_class``. A new tuner starts with ``workers``, the number
    last in use, but steps of many tokens with all: what is best for decoding may be a few, and a
    prompt is over before trials have found more."""

    max_workers: int
    by_size: dict[tuple[int, int], WorkerTuner] = field(default_factory=dict)
    workers: int = 0

    def choose(self, tokens: int, ops: int) -> int:
        """See WorkerChoice; 1 to ``max_workers``."""
        size = ops, size_class(tokens)
        if size not in self.by_size:
            few = self.workers if tokens <= SINGLE_SIZES else 0
            self.by_size[size] = WorkerTuner(self.max_workers, few or self.max_workers)
        worker_tuner = self.by_size[size]
        chosen = worker_tuner.choose()
        self.workers = worker_tuner.workers
        return chosen

    def note(self, tokens: int, ops: int, workers: int, seconds: float) -> None:
        self.by_size[ops, size_class(tokens)].note(workers, seconds / max(1, tokens))


def candidates(workers: int, max_workers: int, downward: bool) -> list[int]:
    """Other numbers worth a trial, distant ones first, smaller and larger in turn.

    They are halves down to one, doubles up to ``max_workers``, then numbers near the one in use. If
    ``downward``, a smaller one comes first if there is any."""
    bits = range(1, max_workers.bit_length() + 1)
    fewer = [max(1, workers >> bit) for bit in bits] + [workers - (workers >> bit) for bit in bits]
    more = [min(max_workers, workers << bit) for bit in bits] + [
        workers + (workers >> bit) for bit in bits
    ]
    sides = ([*fewer, workers - 1], [*more, workers + 1])
    in_turn = chain.from_iterable(zip(*(sides if downward else sides[::-1]), strict=True))
    return [n for n in dict.fromkeys(in_turn) if 1 <= n <= max_workers and n != workers]


def between(first: int, middle: int, last: int) -> bool:
    """Whether ``middle`` lies strictly between ``first`` and ``last``."""
    return first < middle < last or first > middle > last


def typical(seconds: Collection[float]) -> float:
    """The mean of step times without the slowest quarter, which hides interruptions."""
    usual = sorted(seconds)[: max(1, len(seconds) - (len(seconds) + 2) // 4)]
    return sum(usual) / len(usual)


def size_class(tokens: int) -> int:
    """The class of steps of ``tokens`` tokens; the time per token is about equal within a class."""
    return tokens if tokens <= SINGLE_SIZES else SINGLE_SIZES + tokens.bit_length()
