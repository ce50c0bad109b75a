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

from dataclasses import dataclass, field
from typing import Protocol

TRIAL_STEPS = 8
FIRST_GAP = 3
MIN_GAP, MAX_GAP = 8, 256
"""Ordinary steps between two trials."""
TRIAL_SHARE = 0.03
"""Of the time of ordinary steps, what trials may cost beyond it."""
WORTH_CHANGING = 0.97
"""A trial must take less than this share of the usual time to win."""
RECENT, USUAL = 1 / 8, 1 / 32
"""Weights of a new step time in the two running means."""
CHANGED = 1.25
"""Ratio of the two means that says the machine is no longer the same."""
SINGLE_SIZES = 8
"""Steps of up to so many tokens are told apart, larger ones by powers of two."""


@dataclass(slots=True)
class Trial:
    """Steps with another number of workers, against the ``usual`` seconds of one before."""

    workers: int
    usual: float
    submitted: int = 0
    done: int = 0
    seconds: float = 0.0

    @property
    def saved(self) -> float:
        """Seconds less than usual so far; negative when it is slower."""
        return self.done * self.usual - self.seconds

    @property
    def wants_another(self) -> bool:
        """One step goes ahead alone: the queue is not filled with what may be slow."""
        return self.submitted < min(TRIAL_STEPS, 1 + 2 * self.done)

    @property
    def won(self) -> bool:
        """It has saved a whole step, or a little on each."""
        in_all = self.done * self.usual * WORTH_CHANGING
        return self.saved > self.usual or (self.done >= TRIAL_STEPS and self.seconds < in_all)

    @property
    def lost(self) -> bool:
        """It has cost a whole step, or ended without winning."""
        return self.saved < -self.usual or (self.done >= TRIAL_STEPS and not self.won)


@dataclass(slots=True)
class Crew:
    """The number of workers, 1 to ``most``, for steps of one size, and what is known of them.

    ``workers`` is in use; trials go ``stride`` below or above it.
    """

    most: int
    workers: int
    stride: int = 0
    downward: bool = True
    recent: float = 0.0
    usual: float = 0.0
    noted: int = 0
    gap: int = FIRST_GAP
    waited: int = 0
    debt: float = 0.0
    trial: Trial | None = None

    def __post_init__(self) -> None:
        self.stride = self.stride or max(1, self.most // 2)

    def choose(self) -> int:
        """Workers of the next step."""
        if self.trial is None and self.most > 1 and self.waited >= self.gap and self.debt <= 0:
            self.trial = Trial(self._candidate(), self.recent)
        if self.trial is not None and self.trial.wants_another:
            self.trial.submitted += 1
            return self.trial.workers
        return self.workers

    def note(self, workers: int, seconds: float) -> None:
        """A step with ``workers`` took ``seconds``. Steps may be chosen before earlier ones end."""
        trial = self.trial
        if trial is not None and workers == trial.workers:
            trial.done += 1
            trial.seconds += seconds
            if trial.won:
                self._adopt(trial)
            elif trial.lost:
                self._reject(trial)
        elif workers == self.workers:
            self._note_usual(seconds)

    def _note_usual(self, seconds: float) -> None:
        self.noted += 1
        if self.noted <= 2:
            # The first step of all finds cold caches.
            self.recent = self.usual = seconds
        self.recent += RECENT * (seconds - self.recent)
        self.usual += USUAL * (seconds - self.usual)
        if self.trial is not None:
            return
        self.waited += 1
        self.debt = max(0.0, self.debt - TRIAL_SHARE * seconds)
        slower, faster = self.recent > CHANGED * self.usual, self.usual > CHANGED * self.recent
        if slower or faster:
            self.usual = self.recent
            self._look_again(downward=slower)

    def _look_again(self, downward: bool) -> None:
        """The machine has changed: a trial soon, and on that side."""
        if self.workers == (1 if downward else self.most):
            return
        self.gap = MIN_GAP
        self.downward = downward
        self.stride = max(1, self.workers // 2)
        if downward:
            self.debt = 0.0

    def _adopt(self, trial: Trial) -> None:
        self.downward = trial.workers < self.workers
        self.workers = trial.workers
        self.stride = max(1, self.workers // 2 if self.downward else self.workers)
        self.recent = self.usual = trial.seconds / trial.done
        self._rest(MIN_GAP)

    def _reject(self, trial: Trial) -> None:
        self.debt += max(0.0, -trial.saved)
        if self.downward and self.workers < self.most:
            self.downward = False
        else:
            self.downward = True
            self.stride = self.stride // 2 or max(1, self.most // 2)
        self._rest(min(MAX_GAP, max(MIN_GAP, 2 * self.gap)))

    def _rest(self, gap: int) -> None:
        self.trial = None
        self.waited = 0
        self.gap = gap

    def _candidate(self) -> int:
        """The number to try: ``stride`` away, on the side where there is room."""
        if self.workers in (1, self.most):
            self.downward = self.workers > 1
        wanted = self.workers - self.stride if self.downward else self.workers + self.stride
        return min(self.most, max(1, wanted))


class Choice(Protocol):
    """Who says how many workers a step gets."""

    def choose(self, tokens: int) -> int:
        """Workers of the next step, which computes ``tokens``."""

    def note(self, tokens: int, workers: int, seconds: float) -> None:
        """A step of ``tokens`` that ``workers`` computed took ``seconds`` on the device."""


@dataclass(frozen=True, slots=True)
class FixedCrew:
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
    by_size: dict[int, Crew] = field(default_factory=dict)
    workers: int = 0

    def choose(self, tokens: int) -> int:
        """See Choice; 1 to ``most``."""
        size = size_class(tokens)
        if size not in self.by_size:
            self.by_size[size] = Crew(self.most, self.workers or self.most)
        crew = self.by_size[size]
        chosen = crew.choose()
        self.workers = crew.workers
        return chosen

    def note(self, tokens: int, workers: int, seconds: float) -> None:
        """See Choice."""
        self.by_size[size_class(tokens)].note(workers, seconds / max(1, tokens))


def size_class(tokens: int) -> int:
    """Steps of one class take about the same time a token."""
    return tokens if tokens <= SINGLE_SIZES else SINGLE_SIZES + tokens.bit_length()
