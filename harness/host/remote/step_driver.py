"""The driver of an engine whose requests come from another process: it sends all that happens in a
step as one message."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from contract.errors import ZincError
from contract.types import TokenEvent
from harness.host.event_queue import EventQueue, TimedEvent
from harness.host.faults import log_fault
from harness.host.remote.messages import Ended, EngineState, SentFacts, Step
from harness.host.remote.work import Job, Results, submission_of
from harness.host.stream_driver import EventStream
from harness.host.submissions import EngineStopped
from harness.host.threaded_driver import ThreadedDriver
from harness.trace.record import TracedTier
from reference.memory.prefix import Difference
from reference.observer import Observer

REMEMBERED = 4096
"""Most requests whose facts are kept after their end, until their reader says how many of their
tokens the answer has."""
Send = Callable[[object], None]


class StepDriver(ThreadedDriver):
    """``send`` gets a ``Step`` after each step, and ``Ended`` at the end; the rest is as in
    ``ThreadedDriver``. All requests are on one stream, which is never full: the other process says
    whose events nobody reads."""

    def __init__(self, send: Send, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._send = send
        self.stream = EventStream(self, sys.maxsize, events=_SentEvents(self))
        self._answers: list[tuple[int, list[Exception | None]]] = []
        self._refused = False
        self._jobs: dict[int, Job] = {}
        self._steps: list[tuple[float, int]] = []
        self._stalled: set[int] = set()
        self._past: deque[int] = deque()
        self._sent = self._statistics
        self._sent_memory: int | None = None
        self._noticed = _Noticed()
        self._watch.then, self._watch.listener = self._noticed, self

    def status(self) -> EngineState:
        """The engine's state, as it was noted last."""
        self._sent = self._statistics
        state, tier = self.memory_state, self.engine.runner.tier
        if state is not None and state.changes == self._sent_memory:
            state = None
        elif state is not None:
            self._sent_memory = state.changes
        problem = tier.problem if isinstance(tier, TracedTier) else None
        return EngineState(self._statistics, state, problem)

    def accept(self, number: int, groups: Sequence[Sequence[Job]]) -> None:
        """Submit groups of jobs between the same two steps, each group whole or not at all. The
        answer to ``number`` is sent with the next step; at once if one is refused, or if nothing is
        left to step."""

        def begin() -> None:
            answers: list[Exception | None] = []
            for jobs in groups:
                try:
                    self._begin(self._engine, self.stream, submission_of(jobs), time.monotonic())
                    answers.append(None)
                except Exception as error:
                    if not isinstance(error, ZincError):
                        log_fault("a submission failed", error)
                    answers.append(error)
                else:
                    self._jobs |= {job.request.id: job for job in jobs if job.work.returns_results}
            self._refused = self._refused or len(groups) > 1 or any(answers)
            self._answers.append((number, answers))

        self._post_or_raise(begin)

    def stall(self, request_ids: Sequence[int]) -> None:
        """Let requests wait whose events nobody reads."""

        def stall() -> None:
            for number in request_ids:
                if number in self._streams:
                    self._stalled.add(number)
                    self._engine.stall(number)

        self._post(stall)

    def resume(self, request_ids: Sequence[int]) -> None:
        """Let requests go on whose events are read again."""

        def resume() -> None:
            for number in self._stalled.intersection(request_ids):
                self._stalled.discard(number)
                self._engine.unstall(number)
                if number in self._background.late:
                    self._engine.stall(number, patient=True)

        self._post(resume)

    def carry_out(self) -> None:
        left = bool(self._answers)
        super().carry_out()
        if left or self._refused or (self._answers and self._engine.idle):
            self.flush()

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        super().deliver(events)
        if self._answers or self._noticed.changed or self._steps:
            self.flush()

    def stepped(self, seconds: float, tokens: int) -> None:
        """Note what a step took."""
        self._steps.append((seconds, tokens))

    def end(self, reason: EngineStopped) -> None:
        super().end(reason)
        self.flush()
        self._send(Ended(self.key, str(reason)))

    def flush(self, events: Sequence[TimedEvent] = ()) -> None:
        """Send what happened."""
        answers, self._answers, self._refused = self._answers, [], False
        steps, self._steps = self._steps, []
        super()._note_statistics()
        self._send(
            Step(
                self.key,
                events[0].at if events else 0.0,
                [(*one.event,) for one in events],
                answers,
                self._changed_facts(),
                self._results([one.event for one in events]) if self._jobs else (),
                steps,
                None if self._statistics is self._sent else self.status(),
            )
        )

    def _changed_facts(self) -> list[SentFacts]:
        changed, self._noticed.changed = self._noticed.changed, set()
        found = [(number, self.stream.facts.get(number)) for number in changed]
        return [
            SentFacts(number, f.admitted, f.cached, f.from_disk, f.difference, f.preempted)
            for number, f in found
            if f is not None
        ]

    def _results(self, events: Sequence[TokenEvent]) -> list[tuple[int, Results]]:
        """The new results of the requests that have events."""
        ended = {event.request_id: event.finish_reason is not None for event in events}
        results = [
            (number, self._jobs[number].results(ended[number]))
            for number in ended
            if number in self._jobs
        ]
        for number in [number for number in self._jobs if number not in self._streams]:
            del self._jobs[number]
        return results

    def _note_statistics(self) -> None:
        super()._note_statistics()
        if self._engine.idle and self._statistics != self._sent:
            self._send(Step(self.key, 0.0, status=self.status()))

    def _is_stalled(self, stream: EventStream, request_id: int) -> bool:
        return request_id in self._stalled

    def _forget(self, stream: EventStream, request_id: int) -> None:
        super()._forget(stream, request_id)
        self._stalled.discard(request_id)
        self._past.append(request_id)
        if len(self._past) > REMEMBERED:
            past = self._past.popleft()
            if past not in self._streams:
                stream.facts.pop(past, None)
                stream._complete.discard(past)


class _SentEvents(EventQueue):
    """Sends the events of a step instead of keeping them."""

    def __init__(self, driver: StepDriver) -> None:
        super().__init__()
        self._driver = driver

    def give(self, events: Sequence[TimedEvent]) -> bool:
        self._driver.flush(events)
        return True

    def fail(self, error: BaseException) -> None:
        """The driver itself says why it ended."""


class _Noticed(Observer):
    """The ids of requests whose facts changed."""

    def __init__(self) -> None:
        self.changed: set[int] = set()

    def differed(self, at: float, request_id: int, difference: Difference) -> None:
        self.changed.add(request_id)

    def loaded(self, at: float, request_id: int, tokens: int) -> None:
        self.changed.add(request_id)

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        self.changed.add(request_id)

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        self.changed.add(request_id)
