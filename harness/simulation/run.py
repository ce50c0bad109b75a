"""Plays many schedules on several processes: counts of all of them, and the first that failed,
which is shrunk: fewer actions, shorter prompts, fewer tokens."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

from contract.errors import ConfigError
from harness.progress import NullProgress, Progress
from harness.simulation.clock import VirtualClock
from harness.simulation.contests import play_flood
from harness.simulation.drive import Outcome, play
from harness.simulation.fairness import play_mix
from harness.simulation.generate import Profile, generate
from harness.simulation.invariants import Invariant, Violation
from harness.simulation.model import ModelWorld
from harness.simulation.schedule import (
    Arrive,
    Interrupt,
    KeptAction,
    Schedule,
    format_actions,
    keep,
)
from harness.simulation.shares import play_shares
from harness.simulation.world import World, simulated_worlds

MAX_TRIALS = 2000
"""The most schedules that are played to shrink one."""


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> tuple[KeptAction, ...]:
    """A small part of ``schedule``, which fails, that still fails.

    Delta debugging (Zeller and Hildebrandt 2002) on the actions, then halving of the lengths."""
    return _Shrinking(schedule, fails).smallest()


class _Shrinking:
    def __init__(self, schedule: Schedule, fails: Callable[[Schedule], bool]) -> None:
        self._schedule = schedule
        self._fails = fails
        self._trials = 0
        self._kept = [KeptAction(index) for index in range(len(schedule.actions))]

    def smallest(self) -> tuple[KeptAction, ...]:
        before = None
        while before != self._kept and self._trials < MAX_TRIALS:
            before = list(self._kept)
            self._delete()
            self._shorten()
        return tuple(self._kept)

    def _accept(self, kept: list[KeptAction]) -> bool:
        """Continue from ``kept`` if it fails too."""
        if self._trials >= MAX_TRIALS:
            return False
        self._trials += 1
        if not self._fails(keep(self._schedule, kept)):
            return False
        self._kept = kept
        return True

    def _delete(self) -> None:
        size = max(1, len(self._kept) // 2)
        while True:
            start = 0
            while start < len(self._kept):
                if not self._accept(self._kept[:start] + self._kept[start + size :]):
                    start += size
            if size == 1:
                return
            size //= 2

    def _shorten(self) -> None:
        for index, kept in enumerate(self._kept):
            action = self._schedule.actions[kept.action]
            if not isinstance(action, Arrive):
                continue
            self._lower(index, "prompt", len(action.request.prompt), 1)
            self._lower(index, "tokens", action.request.max_tokens, 0)

    def _lower(self, index: int, field: str, full: int, least: int) -> None:
        """Lower one length as far as the schedule still fails, in steps that get smaller."""
        now = getattr(self._kept[index], field)
        now = full if now is None else now
        by = now - least
        while by > 0:
            lower = now - by
            if lower >= least:
                smaller = replace(self._kept[index], **{field: lower})
                if self._accept([*self._kept[:index], smaller, *self._kept[index + 1 :]]):
                    now = lower
                    continue
            by //= 2


BATCH = 50
"""Seeds that a process plays at a time; the first of them is played twice."""
MIX_EVERY = 500
"""One seed of this many is also the seed of a contest of equal tenants."""
CONTESTS = (play_mix, play_shares, play_flood)
CONTEST_EVERY = 50
"""One seed of this many is also the seed of contests, in a profile with adversaries."""
NOT_IN_A_SCHEDULE = frozenset(
    {Invariant.SAME_SEED_SAME_LOG, Invariant.FAIRNESS, Invariant.SHARES, Invariant.PROGRESS}
)
"""Invariants that playing a single schedule cannot check, so its failure cannot be shrunk."""
AHEAD = 4
"""Batches that wait for each process."""
DIGEST_BITS = 128


@dataclass(slots=True)
class SimulationReport:
    """The result of a number of ``schedules``.

    ``counts`` has how often each kind of thing happened. ``digest`` is over all logs: the same for
    the same seeds and the same source. ``failure`` is the first failing seed and its violation."""

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    failure: tuple[int, str] | None = None

    def add(self, other: SimulationReport) -> None:
        """Add the report of later seeds."""
        self.schedules += other.schedules
        self.counts += other.counts
        self.digest = (self.digest + other.digest) % (1 << DIGEST_BITS)
        self.failure = self.failure or other.failure


@contextmanager
def worlds_of(profile: Profile, schedule: Schedule) -> Iterator[list[World]]:
    """The worlds that a schedule of the profile is played on, closed at the end."""
    if profile.model:
        worlds: list[World] = [ModelWorld(schedule.shape, VirtualClock())]
    else:
        worlds = simulated_worlds(schedule)
    try:
        yield worlds
    finally:
        for world in worlds:
            world.close()


def play_on(profile: Profile, schedule: Schedule) -> Outcome:
    """Play a schedule on the worlds of its profile."""
    with worlds_of(profile, schedule) as worlds:
        return play(schedule, worlds)


def violation_of(contest: Callable[[int], None], seed: int) -> Violation | None:
    """The violation that a contest raises for a seed; None where it raises none."""
    try:
        contest(seed)
    except Violation as violation:
        return violation
    return None


def play_seed(profile: Profile, seed: int, *, twice: bool = False) -> Outcome:
    """Play the schedule of a seed, and the contests of this seed if it has any.

    Played ``twice``, the logs must be the same, or those of the second and third time where counts
    of lines say when an interrupt comes."""
    schedule = generate(seed, profile)
    outcome = play_on(profile, schedule)
    every = CONTEST_EVERY if profile.adversaries else MIX_EVERY
    for contest in CONTESTS if profile.adversaries else (play_mix,):
        if outcome.violation is None and seed % every == 0:
            outcome.violation = violation_of(contest, seed)
            outcome.counts["competitions"] += 1
    if twice and outcome.violation is None:
        again = play_on(profile, schedule)
        first = outcome.log_hash
        if first != again.log_hash and any(isinstance(a, Interrupt) for a in schedule.actions):
            # Python may report a line less of code that is traced for the first time.
            first, again = again.log_hash, play_on(profile, schedule)
        if again.log_hash != first:
            outcome.violation = Violation(
                Invariant.SAME_SEED_SAME_LOG, f"{first} and then {again.log_hash}"
            )
    return outcome


def run_batch(profile: Profile, first: int, count: int) -> SimulationReport:
    """Play the seeds from ``first`` on, up to the first that fails."""
    report = SimulationReport()
    with _uncollected():
        for seed in range(first, first + count):
            outcome = play_seed(profile, seed, twice=seed == first)
            failure = None if outcome.violation is None else (seed, str(outcome.violation))
            report.add(SimulationReport(1, outcome.counts, int(outcome.log_hash, 16), failure))
            if failure is not None:
                break
    return report


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn garbage collection off: fifty schedules leave some megabytes of cycles, and collecting
    takes a fourteenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def run_schedules(
    profile: Profile, first: int, count: int, *, jobs: int = 1, progress: Progress | None = None
) -> SimulationReport:
    """Play ``count`` schedules from seed ``first`` on with ``jobs`` processes.

    Ends with the first that fails, which does not depend on ``jobs``. Raises ConfigError where
    several processes cannot share locks."""
    progress = progress or NullProgress()
    progress.start("simulating", count, "schedule")
    report = SimulationReport()
    try:
        for part in _parts(profile, first, count, jobs):
            report.add(part)
            progress.advance(part.schedules)
            if report.failure is not None:
                break
    finally:
        progress.close()
    return report


def _parts(profile: Profile, first: int, count: int, jobs: int) -> Iterator[SimulationReport]:
    """The reports of the batches, in order of their seeds."""
    end = first + count
    batches = ((start, min(BATCH, end - start)) for start in range(first, end, BATCH))
    if jobs == 1:
        for start, size in batches:
            yield run_batch(profile, start, size)
        return
    with _processes(jobs) as pool:
        queue: list[Future[SimulationReport]] = []
        try:
            while True:
                for start, size in islice(batches, max(0, jobs * AHEAD - len(queue))):
                    queue.append(pool.submit(run_batch, profile, start, size))
                if not queue:
                    return
                yield queue.pop(0).result()
        finally:
            pool.shutdown(cancel_futures=True)


def _processes(jobs: int) -> ProcessPoolExecutor:
    """A pool of processes. Raises ConfigError where there is no room for the locks they share."""
    # A forked child would inherit locks held by threads that it does not have.
    context = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(jobs, mp_context=context)
    except OSError as error:
        # The C library writes a lock to a file and names neither; a part of one is no error to it.
        why = f" ({error.strerror})" if error.errno else ""
        raise ConfigError(
            f"no room for locks of several processes{why}; on Linux they are in /dev/shm: free "
            "some of it (df -h /dev/shm), give a container more (--shm-size), or take --jobs 1"
        ) from error


def smallest(
    profile: Profile, seed: int, found: Violation
) -> tuple[tuple[KeptAction, ...], Violation]:
    """The smallest part of a seed's schedule that still breaks the same invariant as ``found``, and
    its violation."""
    last = found

    def fails(smaller: Schedule) -> bool:
        nonlocal last
        violation = play_on(profile, smaller).violation
        if violation is None or violation.invariant is not found.invariant:
            return False
        last = violation
        return True

    return shrink(generate(seed, profile), fails), last


def reproducing_line(profile: Profile, seed: int, kept: tuple[KeptAction, ...] | None) -> str:
    """The command that plays a schedule, or its ``kept`` part, again."""
    line = f"python -m harness.{profile.name}_test --schedules 1 --seed {seed}"
    line += " --model" if profile.model else ""
    return line if kept is None else f"{line} --keep {format_actions(kept)}"
