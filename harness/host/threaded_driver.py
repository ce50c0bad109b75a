"""The driver of an engine that another thread steps, between whose steps its work is done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from contract.types import TokenEvent
from harness.host.driver import EngineDriver
from harness.host.live_memory import LiveMemory
from harness.host.memory_state import MemoryState
from harness.host.posted_work import answering
from harness.host.stream_driver import EventStream, SharedDriver, wait_for_first
from harness.host.submissions import EngineStopped, Submission
from harness.host.turn_watch import TurnWatch
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.observer import Observer

T = TypeVar("T")
P = ParamSpec("P")
MIN_FLUSH_SECONDS = 1.0
"""Least time for writing the disk cache when a driver closes."""
STATISTICS_SECONDS = 0.02
"""Seconds between two updates of the statistics of a working engine."""


class SteppingThread(Protocol):
    """The thread that steps a driver's engine. ``changed`` is notified, under ``lock``, of work
    posted to a driver."""

    lock: threading.RLock
    changed: threading.Condition
    ids: Iterator[int]
    turns: TurnWatch

    def remove(self, driver: ThreadedDriver, /) -> None:
        """End a driver's requests and stop stepping its engine. Raises EngineStopped."""


class ThreadedDriver(EngineDriver, SharedDriver):
    """A driver whose engine ``thread`` steps. Thread-safe."""

    def __init__(
        self,
        thread: SteppingThread,
        key: str,
        make_engine: Callable[[Observer], Engine],
        buffered_events: int,
        memory: LiveMemory | None = None,
    ) -> None:
        super().__init__(make_engine, buffered_events)
        self.memory = memory
        self.key = key
        self._thread = thread
        self._ids = thread.ids
        self._commands: deque[Callable[[], None]] = deque()
        self._statistics, self._noted = self._engine.statistics, time.monotonic()

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's statistics, at most STATISTICS_SECONDS old while it works."""
        return self._statistics

    @property
    def memory_state(self) -> MemoryState | None:
        return None if self.memory is None else self.memory.state

    @property
    def silence(self) -> str | None:
        return self._thread.turns.silence

    @property
    def posted(self) -> bool:
        """Whether posted work waits for the thread."""
        return bool(self._commands)

    @property
    def resting(self) -> bool:
        """Whether all requests are stalled or wait for late work."""
        late = self._background.late
        streams = self._streams.items()
        return bool(streams) and all(
            number in late or self._is_stalled(stream, number) for number, stream in streams
        )

    def owns(self, event: TokenEvent) -> bool:
        """Whether the event belongs to a request of this driver."""
        return event.request_id in self._streams

    def call(
        self, work: Callable[Concatenate[Engine, P], T], /, *more: P.args, **named: P.kwargs
    ) -> T:
        wait, carry_out = answering(
            lambda: work(self._engine, *more, **named), lambda: self.silence
        )
        self._post_or_raise(carry_out)
        return wait()

    def _post_or_raise(self, work: Callable[[], None]) -> None:
        """Do ``work`` between two steps, without waiting for it. Raises EngineStopped."""
        with self._thread.lock:
            if self._ended is not None:
                raise self._ended
            self._commands.append(work)
            self._thread.changed.notify_all()

    def begin(self, stream: EventStream, submission: Submission) -> None:
        """Submit, and wait briefly for the first event. If many threads submit at once, each is
        then woken once, after the others have submitted."""
        now, accepted = time.monotonic(), list[bool]()

        def begin() -> None:
            try:
                self._begin(self._engine, stream, submission, now)
                accepted.append(True)
            except BaseException as error:
                stream._events.fail(error)

        self._post_or_raise(begin)
        wait_for_first(stream, submission, accepted)

    def advance(self) -> bool:
        return False

    def carry_out(self) -> None:
        """Do the posted work."""
        while self._commands:
            self._thread.turns.begin()
            self._commands.popleft()()
        if self.memory is not None:
            self.memory.look(self._engine)
        self._note_statistics()

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Put the events of a step on the streams of their requests."""
        super().deliver(events)
        self._note_statistics()

    def end(self, reason: EngineStopped) -> None:
        """End all requests. Their readers, and threads that wait for posted work, get
        ``reason``."""
        with self._thread.lock:
            self._ended = reason
            left = list(self._commands)
            self._commands.clear()
        super().end(reason)
        for command in left:
            command()

    def abandon(self, reason: EngineStopped) -> None:
        """Let every further call raise ``reason``. Readers are not notified."""
        self._ended = reason

    def close(self, drain_seconds: float = 0.0) -> None:
        deadline = time.monotonic() + drain_seconds
        while self._ended is None and self._streams and time.monotonic() < deadline:
            if self.silence is not None:
                break
            time.sleep(0.05)
        disk = self._engine.disk
        if disk is not None and drain_seconds:
            disk.end_in(max(MIN_FLUSH_SECONDS, deadline - time.monotonic()))
        self.abandon_steps()
        with suppress(EngineStopped):
            self._thread.remove(self)

    def _post(self, work: Callable[[], None]) -> None:
        with suppress(EngineStopped):
            self._post_or_raise(work)

    _post_elsewhere = _post

    def _note_statistics(self) -> None:
        """Publish the engine's statistics to other threads, if it is idle or they are old."""
        now = time.monotonic()
        if self._engine.idle or now - self._noted >= STATISTICS_SECONDS:
            self._statistics, self._noted = self._engine.statistics, now
