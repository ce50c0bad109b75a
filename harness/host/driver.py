"""The driver of one engine: accepts requests, and delivers their events on streams."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from contract.errors import QueueFull, RequestError, ZincError
from contract.types import TokenEvent
from harness.host.background_work import IN_TIME_SECONDS, BackgroundWork
from harness.host.stream_driver import BUFFERED_EVENTS, EventStream, StreamDriver
from harness.host.submissions import EngineStopped, Submission
from harness.host.watch import Listener, RequestFacts, StreamWatch
from harness.late_interrupts import LateInterrupt
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.observer import NO_OBSERVER, Observer

T = TypeVar("T")
P = ParamSpec("P")
STALLED_STEP_SECONDS = 0.01
"""Seconds to wait between two steps while every request is stalled or waits for late work."""


class EngineDriver(StreamDriver):
    """Runs requests on the engine that ``make_engine`` builds with an observer.

    The thread that reads a stream computes the steps, so only one thread may use it all; see
    ``ThreadedDriver`` for many threads. ``observer`` also gets what the engine reports."""

    def __init__(
        self,
        make_engine: Callable[[Observer], Engine],
        buffered_events: int = BUFFERED_EVENTS,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        super().__init__(buffered_events)
        self._watch = StreamWatch(self._streams, observer)
        self._background = BackgroundWork(self._work_done)
        self._posted_elsewhere: deque[Callable[[], None]] = deque()
        self._engine = make_engine(self._watch)

    @property
    def engine(self) -> Engine:
        """The engine, for the thread that steps it."""
        return self._engine

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's statistics."""
        return self._engine.statistics

    @property
    def patience(self) -> float:
        """How long the steps that were begun may take; 0 for none."""
        return sum(map(self._watch.times.patience, self._engine.unread))

    def listen(self, listener: Listener) -> None:
        """Report every further step to ``listener``, instead of any earlier listener."""
        self._watch.listener = listener

    def call(
        self, work: Callable[Concatenate[Engine, P], T], /, *more: P.args, **named: P.kwargs
    ) -> T:
        return work(self._engine, *more, **named)

    def advance(self) -> bool:
        """Compute a step for a reader without events. Returns False if another thread computes the
        steps, so that the reader has to wait. Ctrl-C cancels all requests: it is raised once the
        step is abandoned, so that the engine goes on with what it has cached."""
        while self._posted_elsewhere:
            self._posted_elsewhere.popleft()()
        if not self._engine.idle:
            with LateInterrupt(self.abandon_steps):
                self.deliver(self._engine.step())
        return True

    def abandon_steps(self) -> bool:
        """Say that all requests will be cancelled; see ``Engine.will_cancel``."""
        return self._engine.will_cancel(list(self._streams))

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

    def _post_elsewhere(self, work: Callable[[], None]) -> None:
        """``_post`` for a thread that does not compute the steps."""
        self._posted_elsewhere.append(work)

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Put the events of a step on the streams of their requests."""
        masked = self._background.masked
        for event in events if masked else ():
            if event.request_id in masked and event.finish_reason is None:
                self._background.received(event.request_id, event.token)
        self._hand_out(time.monotonic(), events)
        # After a step without tokens there is time to wait longer for late work.
        for request_id in self._background.settle(
            IN_TIME_SECONDS if events else STALLED_STEP_SECONDS
        ):
            self._engine.stall(request_id, patient=True)

    def _stall(self, stream: EventStream) -> None:
        stream._stalled = True
        if not stream.full:
            stream._stalled = False
            return
        for request_id in stream._live:
            self._engine.stall(request_id)

    def _is_stalled(self, stream: EventStream, request_id: int) -> bool:
        """Whether a request does not run because nobody reads its events."""
        return stream._stalled

    def _work_done(self, request_id: int) -> None:
        """Resume a request whose late work is done. Called on the thread that did it."""

        def go_on() -> None:
            stream = self._streams.get(request_id)
            settled = self._background.settled(request_id)
            if settled and stream is not None and not self._is_stalled(stream, request_id):
                self._engine.unstall(request_id)

        self._post_elsewhere(go_on)

    def _forget(self, stream: EventStream, request_id: int) -> None:
        self._background.forget(request_id)
        super()._forget(stream, request_id)

    def end(self, reason: EngineStopped) -> None:
        """End all requests. Their readers get ``reason``."""
        self._ended = reason
        self.abandon_steps()
        for request_id in list(self._streams):
            self._engine.cancel(request_id)
        self._fail_all(reason)
        self._background.close()
