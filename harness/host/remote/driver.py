"""The driver of an engine in a child process; see ``EngineProcess``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from contract.errors import ZincError
from contract.types import TokenEvent
from harness.host.memory_state import MemoryState
from harness.host.remote.messages import EngineState, Opened, SentFacts, Step
from harness.host.remote.receivers import Receivers
from harness.host.remote.server import EngineServer
from harness.host.stream_driver import (
    FIRST_SECONDS,
    EventStream,
    SharedDriver,
    give_up_if_silent,
    wait_for_first,
)
from harness.host.submissions import EndMessages, EngineStopped, Submission
from harness.host.watch import Listener, RequestFacts
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics

T = TypeVar("T")
P = ParamSpec("P")
Answered = Callable[[Sequence[Exception | None]], None]
"""Called with what refused each submission, or None."""


class Child(Protocol):
    """The child process."""

    ids: Iterator[int]
    words: EndMessages

    @property
    def silence(self) -> str | None:
        """See ``SharedDriver``."""

    def next_number(self) -> int:
        """A number for a question."""

    def send(self, method: Callable[..., None], *arguments: Any) -> None:
        """Have the child call a method of ``EngineServer``. Raises EngineStopped."""

    def ask(self, method: Callable[..., None], *arguments: Any) -> Any:
        """The answer of a method of ``EngineServer``. Raises what it raises, and EngineStopped."""


class ProcessDriver(SharedDriver):
    """As ``ThreadedDriver``, for the engine that ``child`` opened. Thread-safe. ``trace`` is
    what the child last said about it."""

    def __init__(self, child: Child, opened: Opened, buffered_events: int) -> None:
        super().__init__(buffered_events)
        self.key = opened.key
        self.placed = opened.placed
        self._memory: MemoryState | None = None
        self.trace = TraceState() if opened.traced else None
        self._child = child
        self._ids = child.ids
        self._listener: Listener | None = None
        self._receivers: dict[int, Receivers] = {}
        self._waiting: dict[int, tuple[Answered, Sequence[Submission]]] = {}
        self._stalling = threading.Lock()
        self._note(opened.status)

    @property
    def statistics(self) -> EngineStatistics:
        return self._statistics

    @property
    def memory_state(self) -> MemoryState | None:
        return self._memory

    @property
    def silence(self) -> str | None:
        return self._child.silence

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def call(
        self, work: Callable[Concatenate[Engine, P], T], /, *more: P.args, **named: P.kwargs
    ) -> T:
        """As ``StreamDriver.call``; ``work`` is a function of a module."""
        if self._ended is not None:
            raise self._ended
        result: T = self._child.ask(EngineServer.call, self.key, work, more, named)
        return result

    def begin(self, stream: EventStream, submission: Submission) -> None:
        accepted: list[bool] = []

        def answered(errors: Sequence[Exception | None]) -> None:
            if errors[0] is None:
                accepted.append(True)
            else:
                stream._events.fail(errors[0])

        self._send_all(stream, [submission], answered)
        wait_for_first(stream, submission, accepted)

    def submit_to(
        self, stream: EventStream, submissions: Sequence[Submission]
    ) -> list[ZincError | None]:
        ended = threading.Event()
        refused: list[ZincError | None] = []

        def answered(errors: Sequence[Exception | None]) -> None:
            refused.extend(errors)  # type: ignore[arg-type]
            ended.set()

        self._send_all(stream, submissions, answered)
        while not ended.wait(FIRST_SECONDS):
            give_up_if_silent(stream, submissions)
        fault = next((one for one in refused if isinstance(one, EngineStopped)), None)
        if fault is not None:
            raise fault
        return refused

    def _send_all(
        self, stream: EventStream, submissions: Sequence[Submission], answered: Answered
    ) -> None:
        """Send submissions. Raises EngineStopped."""
        now = time.monotonic()
        groups = []
        for submission in submissions:
            group = [Receivers.of(request, submission) for request in submission.requests]
            for one in group:
                number = one.work.request.id
                if one.work.returns_results:
                    self._receivers[number] = one
                stream.facts[number] = RequestFacts(now)
                stream._live.add(number)
                self._streams[number] = stream
            groups.append([one.work for one in group])
        asked = self._child.next_number()
        self._waiting[asked] = answered, submissions
        try:
            if self._ended is not None:
                raise self._ended
            self._child.send(EngineServer.submit, self.key, asked, groups)
        except EngineStopped as error:
            if self._waiting.pop(asked, None) is not None:
                self._drop(submissions)
                raise error

    def _drop(self, submissions: Sequence[Submission]) -> None:
        """Forget requests that were refused."""
        for submission in submissions:
            for request in submission.requests:
                stream = self._streams.get(request.id)
                if stream is not None:
                    self._forget(stream, request.id)
                    stream.facts.pop(request.id, None)

    def cancel(
        self,
        stream: EventStream,
        request_ids: Sequence[int],
        *,
        release: bool = False,
        used: int | None = None,
    ) -> None:
        # One that ended of itself is charged less only if its answer has fewer tokens.
        known = [n for n in request_ids if n in self._streams or used is not None]
        complete = any(number in stream._complete for number in request_ids)
        for number in request_ids:
            self._forget(stream, number)
            if release:
                stream.facts.pop(number, None)
        if known:
            self._tell(EngineServer.cancel, known, used, complete)

    def unstall(self, stream: EventStream) -> None:
        with self._stalling:
            if stream._stalled:
                stream._stalled = False
                self._tell(EngineServer.resume, tuple(stream._live))

    def _stall(self, stream: EventStream) -> None:
        with self._stalling:
            stream._stalled = True
            if stream.full:
                self._tell(EngineServer.stall, tuple(stream._live))
            else:
                stream._stalled = False

    def _tell(self, method: Callable[..., None], *arguments: Any) -> None:
        """Have the child do something, if it lives."""
        with suppress(EngineStopped):
            self._child.send(method, self.key, *arguments)

    def _forget(self, stream: EventStream, request_id: int) -> None:
        super()._forget(stream, request_id)
        self._receivers.pop(request_id, None)

    def received(self, step: Step) -> None:
        """Take a message of the child. Called on one thread."""
        for number, errors in step.answers:
            self._answer(number, errors)
        for facts in step.facts:
            self._note_facts(facts)
        for request_id, results in step.results:
            receivers = self._receivers.get(request_id)
            if receivers is not None:
                receivers.receive(results)
        if step.status is not None:
            self._note(step.status)
        if self._listener is not None:
            for seconds, tokens in step.steps:
                self._listener.stepped(seconds, tokens)
        if step.events:
            self._hand_out(step.at, map(TokenEvent._make, step.events))

    def _answer(self, number: int, errors: Sequence[Exception | None]) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            answered, submissions = waiting
            self._drop([s for s, e in zip(submissions, errors, strict=True) if e is not None])
            answered(errors)

    def _note_facts(self, sent: SentFacts) -> None:
        stream = self._streams.get(sent.request_id)
        facts = None if stream is None else stream.facts.get(sent.request_id)
        if facts is not None:
            _, facts.admitted, facts.cached, facts.from_disk, facts.difference, facts.preempted = (
                sent
            )

    def _note(self, status: EngineState) -> None:
        self._statistics = status.statistics
        if status.memory is not None:
            self._memory = status.memory
        if self.trace is not None:
            self.trace.problem = status.trace_problem

    def end(self, reason: EngineStopped) -> None:
        """End all requests. Their readers get ``reason``."""
        self._ended = self._ended or reason
        for number, (_, submissions) in list(self._waiting.items()):
            self._answer(number, [reason] * len(submissions))
        self._fail_all(reason)

    def close(self, drain_seconds: float = 0.0) -> None:
        """As ``ThreadedDriver.close``."""
        if self._ended is None:
            with suppress(EngineStopped):
                self._child.ask(EngineServer.close, self.key, drain_seconds)
        self.end(EngineStopped(self._child.words.closed))


class TraceState:
    """Why the trace in the child cannot be written; None while it can."""

    problem: str | None = None
