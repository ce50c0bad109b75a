"""The driver of one engine: accepts requests, and delivers their events on streams.

A stream holds a limited number of events. While nobody reads it, its requests are stalled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from contract.errors import QueueFull, RequestError, ZincError
from contract.types import TokenEvent
from harness.host.background_work import IN_TIME_SECONDS, BackgroundWork
from harness.host.event_queue import EventQueue, Offer, TimedEvent
from harness.host.submissions import EngineStopped, Submission, Submits
from harness.host.watch import Listener, RequestFacts, StreamWatch
from harness.late_interrupts import LateInterrupt
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.observer import NO_OBSERVER, Observer

T = TypeVar("T")
BUFFERED_EVENTS = 256
"""Events a stream holds before its requests stall."""
STALLED_STEP_SECONDS = 0.01
"""Seconds to wait between two steps while every request is stalled or waits for late work."""


class EventStream:
    """The events of any number of requests, for one reading thread. ``ready`` is called on the
    engine's thread when there are events."""

    def __init__(
        self, driver: EngineDriver, capacity: int, ready: Callable[[], None] | None = None
    ) -> None:
        self.facts: dict[int, RequestFacts] = {}
        self._driver = driver
        self._capacity = capacity
        self._ready = ready
        self._events = EventQueue()
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

    def _go_on(self) -> None:
        """Resume the requests of a full stream."""
        if self._stalled:
            self._driver.unstall(self)

    def _fail(self, error: ZincError) -> None:
        self._events.fail(error)
        if self._ready is not None:
            self._ready()


class EngineDriver(Submits[EventStream]):
    """Runs requests on the engine that ``make_engine`` builds with an observer.

    The thread that reads a stream computes the steps, so only one thread may use it all; see
    ``ThreadedDriver`` for many threads. ``observer`` also gets what the engine reports."""

    def __init__(
        self,
        make_engine: Callable[[Observer], Engine],
        buffered_events: int = BUFFERED_EVENTS,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self._streams: dict[int, EventStream] = {}
        self._watch = StreamWatch(self._streams, observer)
        self._background = BackgroundWork(self._work_done)
        self._engine = make_engine(self._watch)
        self._buffered = buffered_events
        self._ids = itertools.count(1)
        self._ended: EngineStopped | None = None

    @property
    def engine(self) -> Engine:
        """The engine, for the thread that steps it."""
        return self._engine

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's statistics."""
        return self._engine.statistics

    @property
    def failure(self) -> str | None:
        """Why the engine ended; None while it runs."""
        return None if self._ended is None else str(self._ended)

    def listen(self, listener: Listener) -> None:
        """Report every further step to ``listener``, instead of any earlier listener."""
        self._watch.listener = listener

    def new_id(self) -> int:
        """An id for a request."""
        return next(self._ids)

    def call(self, work: Callable[[Engine], T]) -> T:
        """The result of ``work``, called with the engine between two steps. Raises what it raises,
        and EngineStopped."""
        return work(self._engine)

    def advance(self) -> bool:
        """Compute a step for a reader without events. Returns False if another thread computes the
        steps, so that the reader has to wait. Ctrl-C cancels all requests: it is raised once the
        step is abandoned, so that the engine goes on with what it has cached."""
        if not self._engine.idle:
            with LateInterrupt(self.abandon_steps):
                self.deliver(self._engine.step())
        return True

    def abandon_steps(self) -> bool:
        """Say that all requests will be cancelled; see ``Engine.will_cancel``."""
        return self._engine.will_cancel(list(self._streams))

    def open_stream(
        self, capacity: int | None = None, ready: Callable[[], None] | None = None
    ) -> EventStream:
        """A stream for later requests."""
        return EventStream(self, self._buffered if capacity is None else capacity, ready)

    def submit_to(
        self, stream: EventStream, submissions: Sequence[Submission]
    ) -> list[ZincError | None]:
        """Submit all between the same two steps. Returns for each submission the error that refused
        it, or None. Raises EngineStopped."""
        now = time.monotonic()

        def begin(engine: Engine) -> list[ZincError | None]:
            refused: list[ZincError | None] = []
            for submission in submissions:
                try:
                    self._begin(engine, stream, submission, now)
                    refused.append(None)
                except ZincError as error:
                    refused.append(error)
            return refused

        return self.call(begin)

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

        def end() -> None:
            for request_id in request_ids:
                self._forget(stream, request_id)
                self._engine.cancel(request_id)
                facts = stream.facts.get(request_id)
                if facts is not None and used is not None and used < facts.tokens:
                    if facts.counts is not None:
                        self._engine.usage.take_back(facts.counts, facts.tokens - used)
                    facts.tokens = used
                if release:
                    stream.facts.pop(request_id, None)
                    stream._complete.discard(request_id)

        leaving = [number for number in request_ids if number not in stream._complete]
        if leaving:
            self._engine.will_cancel(leaving)
        self._post(end)

    def unstall(self, stream: EventStream) -> None:
        """Resume the requests of a stream whose reader reads again."""

        def go_on() -> None:
            stream._stalled = False
            for request_id in stream._live:
                self._engine.unstall(request_id)
                if request_id in self._background.late:
                    self._engine.stall(request_id, patient=True)

        self._post(go_on)

    def _begin(
        self, engine: Engine, stream: EventStream, submission: Submission, now: float
    ) -> None:
        if self._ended is not None:
            raise self._ended
        accepted: list[int] = []
        try:
            for request in submission.requests:
                self._streams[request.id] = stream
                counts = engine.usage.entry(request.tenant)
                stream.facts[request.id] = RequestFacts(now, counts=counts)
                mask = submission.masks.get(request.id)
                engine.submit(
                    request,
                    submission.logits.get(request.id),
                    submission.first_row_of(request),
                    mask,
                    output=submission.output,
                    on_scores=submission.scores.get(request.id),
                    on_experts=submission.experts.get(request.id),
                )
                accepted.append(request.id)
                if mask is not None:
                    self._background.add(request.id, mask)
                stream._live.add(request.id)
        except BaseException as error:
            no_others = engine.statistics.waiting == len(accepted)
            for request in submission.requests:
                self._forget(stream, request.id)
                stream.facts.pop(request.id, None)
            for request_id in accepted:
                engine.cancel(request_id)
            if isinstance(error, QueueFull) and no_others:
                limit = len(accepted)
                problem = f"times the prompts is above {limit}, the most that may wait at once"
                raise RequestError("n", problem) from None
            raise

    def _post(self, work: Callable[[], None]) -> None:
        """Do ``work`` between two steps, without waiting for it."""
        work()

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Put the events of a step on the streams of their requests."""
        now = time.monotonic()
        given: dict[EventStream, list[TimedEvent]] = {}
        streams, masked = self._streams, self._background.masked
        for event in events:
            number = event.request_id
            stream = streams.get(number)
            if stream is None:
                continue
            delivered = given.get(stream)
            if delivered is None:
                given[stream] = [TimedEvent(now, event)]
            else:
                delivered.append(TimedEvent(now, event))
            if event.token >= 0:
                stream.facts[number].tokens += 1
            if event.finish_reason is not None:
                self._forget(stream, number)
            elif number in masked:
                self._background.received(number, event.token)
        for stream, delivered in given.items():
            accepted = stream._events.give(delivered)
            if stream._ready is not None:
                stream._ready()
            if not accepted:
                self._stall_if_full(stream)
        # After a step without tokens there is time to wait longer for late work.
        for request_id in self._background.settle(
            IN_TIME_SECONDS if events else STALLED_STEP_SECONDS
        ):
            self._engine.stall(request_id, patient=True)

    def _stall_if_full(self, stream: EventStream) -> None:
        """Stall the requests of a stream that nobody reads.

        The reader checks ``_stalled`` after taking events, and this checks the events after setting
        ``_stalled``. So at least one of the two threads sees the other's change."""
        events, capacity = stream._events, stream._capacity
        if stream._stalled or len(events) < capacity:
            return
        stream._stalled = True
        if len(events) < capacity:
            stream._stalled = False
            return
        for request_id in stream._live:
            self._engine.stall(request_id)

    def _work_done(self, request_id: int) -> None:
        """Resume a request whose late work is done. Called on the thread that did it."""

        def go_on() -> None:
            stream = self._streams.get(request_id)
            if self._background.settled(request_id) and stream is not None and not stream._stalled:
                self._engine.unstall(request_id)

        self._post(go_on)

    def _forget(self, stream: EventStream, request_id: int) -> None:
        self._background.forget(request_id)
        stream._live.discard(request_id)
        self._streams.pop(request_id, None)

    def end(self, reason: EngineStopped) -> None:
        """End all requests. Their readers get ``reason``."""
        self._ended = reason
        self.abandon_steps()
        for request_id, stream in list(self._streams.items()):
            self._engine.cancel(request_id)
            stream._fail(reason)
        self._streams.clear()
        self._background.close()
