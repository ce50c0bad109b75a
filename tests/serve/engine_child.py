"""``python -m tests.serve.engine_child FD``: the process of a server's engines, with what tests
add."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from contract.types import Tenant, TokenEvent
from harness import tiers
from harness.host import disk, turn_watch
from harness.host.engine_thread import THREADS
from harness.host.event_queue import TimedEvent
from harness.host.remote.server import EngineServer, main
from harness.host.remote.step_driver import StepDriver
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.memory.disk.cache import DiskCacheOptions
from reference.runner import StepInput, Submission
from tests.named_tiers import quick_tier
from tests.null_tier import NullTier
from tests.patience import PATIENCE_SECONDS, POLL_SECONDS

NULL_TOKEN = 65
QUICK = "quick"
ADDED = {QUICK: lambda options: quick_tier(), "null": lambda options: NullTier(NULL_TOKEN)}
"""Functions that open a tier that only tests have, by its name."""
PATIENT = partial(DiskCacheOptions, patience=PATIENCE_SECONDS, flush_seconds=PATIENCE_SECONDS)
"""A busy machine's disk is waited for."""


def rests(engine: Engine) -> bool:
    """Whether an engine has nothing to do."""
    return engine.idle


def statistics_of(engine: Engine) -> EngineStatistics:
    """The engine's statistics now."""
    return engine.statistics


def tenant_of(engine: Engine, number: int) -> Tenant | None:
    """The tenant that an engine has by this id."""
    return next((one for one in engine.tenants if one.id == number), None)


def hang_while(engine: Engine, path: Path) -> None:
    """The device hangs in every step that begins while there is a file."""
    submit = engine.runner.submit

    def hung(inputs: StepInput) -> Submission:
        if path.exists():
            with impatience():
                while path.exists():
                    time.sleep(POLL_SECONDS)
        return submit(inputs)

    engine.runner.submit = hung  # type: ignore[method-assign]


def be_watchful(engine: Engine | None = None) -> None:
    """A thread is looked at often. A step that does not hang may take its time all the same."""
    turn_watch.WATCH_SECONDS, turn_watch.END_SECONDS = 0.05, 1.0


@contextmanager
def impatience(seconds: float = 1.0) -> Iterator[None]:
    """The step that this thread of engines makes is taken to hang once it has taken so long. Those
    of other engines, which only a busy machine makes long, are not."""
    thread = threading.current_thread()
    (watch,) = (one.turns for one in list(THREADS) if one._thread is thread)
    before, watch._patience = watch._patience, lambda: seconds
    try:
        yield
    finally:
        watch._patience = before


def never_too_slow(engine: Engine) -> None:
    """Let requests wait for ever whose events nobody reads."""
    engine._stall_steps = 10**6


class _Pace:
    """Lets a step begin once the server has taken the events of all steps before."""

    def __init__(self) -> None:
        self._untaken = 0
        self._changed = threading.Condition()
        self._flush, self._step = StepDriver.flush, Engine.step

    def sent(self, driver: StepDriver, events: Sequence[TimedEvent] = ()) -> None:
        """Takes the place of ``StepDriver.flush``."""
        with self._changed:
            self._untaken += bool(events)
        self._flush(driver, events)

    def taken(self) -> None:
        """The events of one message were taken."""
        with self._changed:
            self._untaken -= 1
            self._changed.notify_all()

    def step(self, engine: Engine) -> list[TokenEvent]:
        """Takes the place of ``Engine.step``. What is asked between steps is done meanwhile."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._untaken, POLL_SECONDS):
                return []
        return self._step(engine)


PACES: list[_Pace] = []


def keep_pace(engine: Engine) -> None:
    """From now on no step begins before the server has said of the last one that it is taken."""
    PACES[:] = [pace := _Pace()]
    StepDriver.flush = lambda *given: pace.sent(*given)  # type: ignore[method-assign]
    Engine.step = lambda engine: pace.step(engine)  # type: ignore[method-assign]


def taken(server: EngineServer, key: str) -> None:
    """The server has taken the events of a step."""
    PACES[0].taken()


def check_memory(engine: Engine) -> None:
    """Check the engine's memory."""
    engine.memory.check()


def flush_disk(engine: Engine) -> int:
    """Write what the disk cache has; returns how many pages it wrote in all."""
    assert engine.disk is not None
    engine.disk.flush()
    return engine.disk.statistics.written


if __name__ == "__main__":
    tiers.TIERS.update(ADDED)
    disk.DiskCacheOptions = PATIENT  # type: ignore[misc, assignment]
    main(int(sys.argv[1]))
