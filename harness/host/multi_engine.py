"""Several models on one thread: their engines share the tenants' quotas and take turns."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from contract.errors import DeviceLost
from contract.types import Tenant, TokenEvent
from harness.host.driver import (
    BUFFERED_EVENTS,
    STALLED_STEP_SECONDS,
    EngineDriver,
    answering,
)
from harness.host.faults import log_fault
from harness.host.submissions import EngineStopped, reason_of_end
from reference.engine import Engine
from reference.engine.models import Loaded, Models, no_loader
from reference.observer import Observer
from reference.sched.tenants import Tenants

T = TypeVar("T")
log = logging.getLogger("zinc_rt.serve")


class SharedDriver(EngineDriver):
    """Drives an engine on the thread of ``together``, as the only one of its ``key`` there."""

    def __init__(
        self,
        together: MultiEngineDriver,
        key: str,
        make_engine: Callable[[Observer], Engine],
        buffered_events: int,
    ) -> None:
        super().__init__(make_engine, buffered_events)
        self.key = key
        self._together = together
        self._changed, self._ids = together.changed, together.ids

    @property
    def engine(self) -> Engine:
        """For the thread."""
        return self._engine

    @property
    def asked(self) -> bool:
        """Whether there is something to carry out."""
        return bool(self._commands)

    @property
    def resting(self) -> bool:
        """Whether nothing is computed for now for any request there is."""
        return self._all_rest()

    def owns(self, event: TokenEvent) -> bool:
        """Whether the event is of a request on a stream of this driver."""
        return event.request_id in self._streams

    def start(self) -> None:
        """Take part in the turns."""
        self._together.join(self)

    def carry_out(self) -> None:
        """Do what other threads asked for."""
        while self._commands:
            self._commands.popleft()()
        self._note_statistics()

    def deliver(self, events: list[TokenEvent]) -> None:
        """Put what a step gave on the streams."""
        self._deliver(events)
        self._note_statistics()

    def end(self, reason: EngineStopped) -> None:
        """Tell everybody who waits that there is no more."""
        self._end(reason)

    def close(self, drain_seconds: float = 0.0) -> None:
        """See ``EngineDriver``; the thread goes on with the other engines."""
        self._drain(drain_seconds)
        with suppress(EngineStopped):
            self._together.leave(self)


class MultiEngineDriver:
    """The thread that steps the engines of all models of a server, one at a time: see ``Models``.

    A step is one model's, and so is whatever else touches an engine: the engines share
    ``tenants``. ``start`` it, and ``close`` it when done; ``call`` may be made from any thread.
    """

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self.tenants = Tenants(tenants, clock=time.monotonic)
        self.changed = threading.Condition()
        self.ids = itertools.count(1)
        self._models = Models(no_loader, time.monotonic)
        self._drivers: dict[str, SharedDriver] = {}
        self._keys = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._ended: EngineStopped | None = None
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def driver(
        self, make_engine: Callable[[Observer], Engine], buffered_events: int = BUFFERED_EVENTS
    ) -> SharedDriver:
        """A driver for one more engine, whose tenants are ``tenants``; ``start`` it."""
        return SharedDriver(self, str(next(self._keys)), make_engine, buffered_events)

    def call(self, work: Callable[[Models], T]) -> T:
        """What ``work`` gives for the models, between two steps; its exceptions come back too.

        Raises EngineStopped when the thread has ended.
        """
        future, carry_out = answering(lambda: work(self._models))
        with self.changed:
            if self._ended is not None:
                raise self._ended
            self._commands.append(carry_out)
            self.changed.notify()
        return future.result()

    def change_tenants(self, change: Callable[[Models], T]) -> T:
        """Carry out a change of the tenants in all engines."""
        return self.call(change)

    def join(self, driver: SharedDriver) -> None:
        """Step the driver's engine too from now on. Raises EngineStopped."""

        def add(models: Models) -> None:
            models.add(driver.key, Loaded(driver.engine, 0, lambda: None))
            self._drivers[driver.key] = driver

        self.call(add)

    def leave(self, driver: SharedDriver) -> None:
        """End what is left of the driver's requests, and step its engine no more. Raises
        EngineStopped."""

        def take_out(models: Models) -> None:
            if self._drivers.pop(driver.key, None) is not None:
                models.take_out(driver.key)
                driver.end(EngineStopped("the model is unloaded"))

        self.call(take_out)

    def close(self) -> None:
        """End what is under way, and stop."""
        with self.changed:
            self._closing = True
            self.changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        def turn() -> None:
            while self._commands:
                self._commands.popleft()()
            for driver in self._drivers.values():
                driver.carry_out()
            if not self._models.idle:
                self._step()

        self._end(reason_of_end(self._wait, turn, "engines"))

    def _wait(self) -> bool:
        """Rest while there is nothing to do; False when it is time to end."""
        with self.changed:
            while not (self._closing or self._asked or not self._models.idle):
                self.changed.wait()
            drivers = [driver for driver in self._drivers.values() if not driver.engine.idle]
            if drivers and not self._asked and all(driver.resting for driver in drivers):
                self.changed.wait(STALLED_STEP_SECONDS)
            return not self._closing

    @property
    def _asked(self) -> bool:
        return bool(self._commands) or any(driver.asked for driver in self._drivers.values())

    def _step(self) -> None:
        try:
            events = self._models.step()
        except DeviceLost:
            raise
        except Exception as error:
            # What ran waits again; the engine itself ends a request under which steps keep failing.
            log_fault("a step failed", error)
            return
        for driver in self._drivers.values():
            own = [event for event in events if driver.owns(event)]
            if own or not events:
                driver.deliver(own)

    def _end(self, reason: EngineStopped) -> None:
        with self.changed:
            self._ended = reason
            left: list[Any] = list(self._commands)
            self._commands.clear()
        for driver in self._drivers.values():
            driver.end(reason)
        for command in left:
            command()
