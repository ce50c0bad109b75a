"""The thread that steps the engines of all models of a process. Other threads post work to it.

An engine is single-threaded, so everything that uses it runs on this thread between two steps."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

from contract.context_manager import ContextManager
from contract.errors import DeviceLost, ModelFileError
from contract.types import LOCAL_TENANT, Tenant
from harness.host.driver import STALLED_STEP_SECONDS
from harness.host.faults import log_fault
from harness.host.live_memory import POLL_SECONDS, LiveMemory
from harness.host.posted_work import answering, reason_of_end
from harness.host.stream_driver import BUFFERED_EVENTS
from harness.host.submissions import EndMessages, EngineStopped
from harness.host.threaded_driver import ThreadedDriver
from harness.host.turn_watch import TurnWatch, other_patience
from reference.engine import Engine
from reference.engine.models import Loaded, Models, no_loader
from reference.memory.prefix import Scope
from reference.observer import Observer
from reference.sched.tenants import Tenants

T = TypeVar("T")
P = ParamSpec("P")
log = logging.getLogger("zinc_rt.serve")
FORKED = (
    "this process was forked from the one that opened the model, and no thread computes in it; "
    "open a model in each process, or start processes by multiprocessing's method spawn"
)


class EngineThread(ContextManager):
    """Steps the engines of its drivers in turns; see ``Models``. A context manager, and
    thread-safe.

    All engines share its ``tenants``, so quotas hold for all models together. ``words`` are the
    messages for clients after its end. ``forget`` is called for a removed scope. ``driver_of``
    makes drivers."""

    def __init__(
        self,
        tenants: Iterable[Tenant] = (LOCAL_TENANT,),
        words: EndMessages | None = None,
        forget: Callable[[Scope], None] = lambda scope: None,
        driver_of: Callable[..., ThreadedDriver] = ThreadedDriver,
    ) -> None:
        self.tenants = Tenants(tenants, clock=time.monotonic, forget=forget)
        # Ctrl-C raises an exception in the main thread between any two lines of Python code. An
        # RLock has no Python code, and ``notify_all`` repeats a ``notify`` that was interrupted.
        # Otherwise one of the two threads could wait for ever.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.ids = itertools.count(1)
        self._words = words or EndMessages()
        self._driver_of = driver_of
        self._models = Models(no_loader, time.monotonic)
        self._drivers: dict[str, ThreadedDriver] = {}
        self._keys = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._ended: EngineStopped | None = None
        self.turns = TurnWatch(f"the engine hangs; {self._words.remedy}", self._hangs)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.turns.start()
        self._thread.start()
        THREADS.add(self)

    def add(
        self,
        make_engine: Callable[[Observer], Engine],
        buffered_events: int = BUFFERED_EVENTS,
        memory: LiveMemory | None = None,
    ) -> ThreadedDriver:
        """Step one more engine; returns its driver. ``memory`` watches the device's memory between
        steps. Raises EngineStopped."""
        key = str(next(self._keys))
        driver = self._driver_of(self, key, make_engine, buffered_events, memory)

        def add(models: Models) -> None:
            models.add(driver.key, Loaded(driver.engine, 0, lambda: None))
            self._drivers[driver.key] = driver

        self.call(add)
        return driver

    def remove(self, driver: ThreadedDriver) -> None:
        """End a driver's requests and stop stepping its engine. Raises EngineStopped; if the thread
        hangs, only after ``end_by``, since its step may use what the caller frees then."""
        self._call(
            lambda: self._take_out(self._models, driver, self._words.closed),
            lambda: self.silence if self.turns.ending else None,
        )

    def remove_all(self) -> None:
        """End all requests and stop stepping any engine. Raises EngineStopped if the thread has
        ended, or hangs: then it uses what the engines have."""
        for driver in list(self._drivers.values()):
            driver.abandon_steps()

        def remove() -> None:
            for driver in list(self._drivers.values()):
                self._take_out(self._models, driver, self._words.closed)

        self._call(remove, lambda: self.silence)

    def call(
        self, work: Callable[Concatenate[Models, P], T], /, *more: P.args, **named: P.kwargs
    ) -> T:
        """The result of ``work``, called with the models between two steps, and with what else is
        given. Raises what it raises, and EngineStopped."""
        return self._call(lambda: work(self._models, *more, **named), lambda: self.silence)

    def _call(self, work: Callable[[], T], silence: Callable[[], str | None]) -> T:
        wait, carry_out = answering(work, silence)
        with self.lock:
            if self._ended is not None:
                raise self._ended
            self._commands.append(carry_out)
            self.changed.notify_all()
        return wait()

    @property
    def silence(self) -> str | None:
        """What to say of the thread if it hangs; None while it works."""
        return self.turns.silence

    @property
    def hangs(self) -> bool:
        """Whether the thread hangs, which uses what the models have in this process."""
        return self.turns.silence is not None

    def end_by(self, at: float) -> None:
        """Take the thread to hang if it works for much longer than ``at``, a time of
        ``time.monotonic``."""
        self.turns.end_by(at)

    def _patience(self) -> float:
        """How long the step may take, for which the device may compute those of other models, too.
        Before it is begun, pages may be read from disk."""
        stepped, drivers = self._models.stepped, list(self._drivers.items())
        steps = [one.patience or other_patience() * (key == stepped) for key, one in drivers]
        return sum(steps) or other_patience()

    def _hangs(self) -> None:
        """Tell all who wait that the thread hangs."""
        for driver in list(self._drivers.values()):
            driver.fail_streams(EngineStopped(self.silence or self._words.closed))

    def wait(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End all requests and the thread."""
        with self.lock:
            self._closing = True
            self.changed.notify_all()
        for driver in list(self._drivers.values()):
            driver.abandon_steps()
        self._thread.join()

    def abandon(self) -> None:
        """Let every further call raise EngineStopped. For a forked process, which does not have the
        thread."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._ended = EngineStopped(FORKED)
        for driver in self._drivers.values():
            driver.abandon(self._ended)

    def _run(self) -> None:
        def turn() -> None:
            while self._commands:
                turns.begin()
                self._commands.popleft()()
            for driver in self._drivers.values():
                turns.begin()
                driver.carry_out()
            if not self._models.idle:
                self._step()
            turns.end()

        turns, turns.thread = self.turns, threading.get_ident()
        reason = reason_of_end(self._wait, turn, self._words)
        turns.close()
        self._end(reason)

    def _wait(self) -> bool:
        """Wait while there is nothing to do. Returns False when the thread must end."""
        with self.lock:
            if not (self._closing or self._posted or not self._models.idle):
                looking = any(one.memory is not None for one in self._drivers.values())
                self.changed.wait(POLL_SECONDS if looking else None)
            busy = [driver for driver in self._drivers.values() if not driver.engine.idle]
            if busy and not self._posted and all(driver.resting for driver in busy):
                self.changed.wait(STALLED_STEP_SECONDS)
            return not self._closing

    @property
    def _posted(self) -> bool:
        return bool(self._commands) or any(driver.posted for driver in self._drivers.values())

    def _step(self) -> None:
        self.turns.begin(self._patience)
        try:
            events = self._models.step()
        except DeviceLost:
            raise
        except ModelFileError as error:
            log.error("the engine of a model ended: %s", error)
            words = f"the model's file was changed; {self._words.changed}"
            self._take_out(self._models, self._drivers[self._models.stepped], words)
            return
        except Exception as error:
            # Its sequences wait again. The engine ends a request whose steps keep failing.
            log_fault("a step failed", error)
            return
        self.turns.begin()
        for driver in self._drivers.values():
            own = [event for event in events if driver.owns(event)]
            if own or not events:
                driver.deliver(own)

    def _take_out(self, models: Models, driver: ThreadedDriver, reason: str) -> None:
        if self._drivers.pop(driver.key, None) is not None:
            models.take_out(driver.key)
            driver.end(EngineStopped(reason))

    def _end(self, reason: EngineStopped) -> None:
        with self.lock:
            self._ended = reason
            left = list(self._commands)
            self._commands.clear()
        for driver in self._drivers.values():
            driver.end(reason)
        for command in left:
            command()


THREADS: weakref.WeakSet[EngineThread] = weakref.WeakSet()
"""Every engine's thread of this process."""


def _abandon_all() -> None:
    for thread in list(THREADS):
        thread.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
