"""Streams of events, and the driver that hands the events of its engine to them.

A stream holds a limited number of events. While nobody reads it, its requests are stalled."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from contract.errors import ZincError
from contract.types import TokenEvent
from harness.host.event_queue import EventQueue, Offer, TimedEvent
from harness.host.memory_state import MemoryState
from harness.host.submissions import EngineStopped, Submission, Submits
from harness.host.watch import Listener, RequestFacts
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics

T = TypeVar("T")
P = ParamSpec("P")
BUFFERED_EVENTS = 256
"""Events a stream holds before its requests stall."""
FIRST_SECONDS = 0.25
"""How long a submission waits for the first event before it checks whether it was accepted."""


class EventStream:
    """The events of any number of requests, for one reading thread. ``ready`` is called on the
    engine's thread when there are events."""

    def __init__(
        self,
        driver: StreamDriver,
        capacity: int,
        ready: Callable[[], None] | None = None,
        events: EventQueue | None = None,
    ) -> None:
        self.facts: dict[int, RequestFacts] = {}
        self._driver = driver
        self._capacity = capacity
        self._ready = ready
        self._events = EventQueue() if events is None else events
        self._first: list[TimedEvent] = []
        self._live: set[int] = set()
        self._complete: set[int] = set()
        self._stalled = False

    def take(self, timeout: float, offer: Offer | None = None) -> list[TimedEvent]:
        """The available events, after waiting up to ``timeout`` seconds for the first; empty if
        none came. Meanwhile the engine's thread passes events to ``offer``: see ``EventQueue``.
        Raises EngineStopped if no more events will come."""
        self._go_on()
        taken, self._first = self._first, []
        if taken:
            return taken
        if not len(self._events) and self._driver.advance():
            timeout = 0.0
        taken = self._events.take(timeout, offer)
        # The engine may have found the stream full while its events were taken.
        self._go_on()
        return taken

    def wake(self) -> None:
        """Wake the waiting reader. Only an offer calls it."""
        self._events.wake()

    def cancel(self, request_id: int | None = None, used: int | None = None) -> None:
        """Cancel one request, or all, before the next step, without waiting, and abandon a step
        that nobody else needs. If the answer has ``used`` tokens, the tenant is not charged for
        later ones."""
        ids = [request_id] if request_id is not None else list(self.facts)
        self._driver.cancel(self, ids, used=used)

    def end(self, request_id: int, used: int) -> None:
        """As ``cancel``, but its steps are completed, whatever is cancelled later: the next prompt
        may continue the answer."""
        self._complete.add(request_id)
        self._driver.cancel(self, [request_id], used=used)

    def release(self, request_ids: Sequence[int]) -> None:
        """As ``cancel``, and drop the facts of the requests: for a stream with endless requests."""
        self._driver.cancel(self, request_ids, release=True)

    def wait(self, timeout: float) -> bool:
        """Wait for the first events, which the next ``take`` returns. Returns whether any came."""
        self._first = self._events.take(timeout)
        return bool(self._first)

    @property
    def full(self) -> bool:
        """Whether it holds as many events as it may."""
        return len(self._events) >= self._capacity

    def _go_on(self) -> None:
        """Resume the requests of a full stream."""
        if self._stalled:
            self._driver.unstall(self)

    def _fail(self, error: ZincError) -> None:
        self._events.fail(error)
        if self._ready is not None:
            self._ready()


class StreamDriver(Submits[EventStream]):
    """The streams of one engine, in this process or another one. ``buffered_events``: unread events
    of a stream before its requests stall."""

    def __init__(self, buffered_events: int = BUFFERED_EVENTS) -> None:
        self._streams: dict[int, EventStream] = {}
        self._buffered = buffered_events
        self._ids: Iterator[int] = itertools.count(1)
        self._ended: EngineStopped | None = None

    @property
    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """The engine's statistics."""

    @property
    def failure(self) -> str | None:
        """Why the engine ended; None while it runs."""
        return None if self._ended is None else str(self._ended)

    @property
    def silence(self) -> str | None:
        """What to say of an engine whose thread or process hangs; None while it answers."""
        return None

    @abstractmethod
    def listen(self, listener: Listener) -> None:
        """Report every further step to ``listener``, instead of any earlier listener."""

    def new_id(self) -> int:
        """An id for a request."""
        return next(self._ids)

    @abstractmethod
    def call(
        self, work: Callable[Concatenate[Engine, P], T], /, *more: P.args, **named: P.kwargs
    ) -> T:
        """The result of ``work``, called with the engine between two steps, and with what else is
        given. Raises what it raises, and EngineStopped."""

    def advance(self) -> bool:
        """Compute a step for a reader without events. Returns False if another thread computes the
        steps, so that the reader has to wait."""
        return False

    def open_stream(
        self, capacity: int | None = None, ready: Callable[[], None] | None = None
    ) -> EventStream:
        """A stream for later requests."""
        return EventStream(self, self._buffered if capacity is None else capacity, ready)

    @abstractmethod
    def cancel(
        self,
        stream: EventStream,
        request_ids: Sequence[int],
        *,
        release: bool = False,
        used: int | None = None,
    ) -> None:
        """Cancel requests of a stream; unknown and finished ones are ignored. See
        ``EventStream``."""

    @abstractmethod
    def unstall(self, stream: EventStream) -> None:
        """Resume the requests of a stream whose reader reads again."""

    def _hand_out(self, at: float, events: Iterable[TokenEvent]) -> None:
        """Put the events of a step, read ``at``, on the streams of their requests."""
        given: dict[EventStream, list[TimedEvent]] = {}
        streams = self._streams
        for event in events:
            number = event.request_id
            stream = streams.get(number)
            if stream is None:
                continue
            delivered = given.get(stream)
            if delivered is None:
                given[stream] = [TimedEvent(at, event)]
            else:
                delivered.append(TimedEvent(at, event))
            if event.token >= 0:
                stream.facts[number].tokens += 1
            if event.finish_reason is not None:
                self._forget(stream, number)
        for stream, delivered in given.items():
            accepted = stream._events.give(delivered)
            if stream._ready is not None:
                stream._ready()
            if not accepted and not stream._stalled and stream.full:
                self._stall(stream)

    @abstractmethod
    def _stall(self, stream: EventStream) -> None:
        """Stall the requests of a stream that nobody reads.

        The reader checks ``_stalled`` after taking events, and this checks the events after setting
        ``_stalled``. So at least one of the two threads sees the other's change."""

    def _forget(self, stream: EventStream, request_id: int) -> None:
        stream._live.discard(request_id)
        self._streams.pop(request_id, None)

    def fail_streams(self, reason: EngineStopped) -> None:
        """Give all readers ``reason``, who then cancel their requests. Any thread may call this."""
        for stream in list(self._streams.values()):
            stream._fail(reason)

    def _fail_all(self, reason: EngineStopped) -> None:
        """End all streams with ``reason``."""
        self.fail_streams(reason)
        self._streams.clear()


class SharedDriver(StreamDriver):
    """A driver for many threads. ``key`` is unique among the drivers that share their tenants."""

    key: str

    @property
    @abstractmethod
    def memory_state(self) -> MemoryState | None:
        """The state of the device's memory, if it is watched."""

    @abstractmethod
    def close(self, drain_seconds: float = 0.0) -> None:
        """Let running requests end for up to ``drain_seconds``, end the rest, and stop stepping the
        engine."""


def wait_for_first(stream: EventStream, submission: Submission, accepted: list[bool]) -> None:
    """Wait until ``submission`` to ``stream`` is ``accepted``, and briefly for its first event. If
    many threads submit at once, each is then woken once, after the others have submitted. Raises
    what refused it, and EngineStopped if the engine hangs."""
    try:
        while not (stream.wait(FIRST_SECONDS) or accepted):
            give_up_if_silent(stream, [submission])
    except Exception as error:
        if not accepted:
            raise
        # The request was accepted, so the stream reports the error.
        stream._events.fail(error)


def give_up_if_silent(stream: EventStream, submissions: Iterable[Submission]) -> None:
    """Raise EngineStopped if the engine hangs; if it goes on later, it cancels the requests."""
    driver = stream._driver
    silence = driver.silence
    if silence is not None:
        ids = [request.id for submission in submissions for request in submission.requests]
        driver.cancel(stream, ids)
        raise EngineStopped(silence)
