"""Runs many prompts on one engine, with enough of them in flight to keep it busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, Protocol, TypeVar

from contract.errors import ZincError
from contract.types import Request, TokenEvent
from harness.host.event_queue import TimedEvent
from harness.host.stream_driver import EventStream, StreamDriver
from harness.host.submissions import WAIT_SECONDS, Submission

Result = TypeVar("Result")
Given = TypeVar("Given", covariant=True)
UNREAD_EVENTS = 1 << 20
"""Most unread events: enough that the engine never stalls a batch."""
BUFFERED_EVENTS = 32
"""Events that are buffered before the reader is woken. The reader takes processor time from a tier
on the same cores, and only the end of a prompt gives a result."""


class Work(Protocol[Given]):
    """A submitted prompt. It takes its events until it is done."""

    @property
    def requests(self) -> Sequence[Request]:
        """The engine requests."""

    @property
    def submission(self) -> Submission:
        """The requests, and the receivers of the engine's results."""

    @property
    def done(self) -> bool:
        """Whether it took its last event."""

    @property
    def ends_early(self) -> bool:
        """Whether an event other than the engine's last one may end it."""

    def take(self, event: TokenEvent, stream: EventStream) -> object:
        """Take the next event of one of the requests. Raises ZincError if the model fails."""

    def output(self, stream: EventStream) -> Given:
        """The result, after the last event."""

    def failed(self, error: ZincError) -> Given:
        """The result of a prompt that failed."""


@dataclass(frozen=True, slots=True)
class Finished(Generic[Result]):
    """A prompt whose result needs no engine."""

    result: Result


Job = Callable[[], Work[Result] | Finished[Result]]
"""Prepares a prompt, for example tokenizes it, while the engine works on others."""


def run_batch(driver: StreamDriver, jobs: Iterator[Job[Result]], at_once: int) -> Iterator[Result]:
    """The results of all jobs, each as soon as it is complete; ``at_once`` jobs run at a time. If
    the iteration ends early, running jobs are cancelled. Raises EngineStopped."""
    stream = driver.open_stream(UNREAD_EVENTS)
    pending: dict[int, Work[Result]] = {}
    in_flight = 0
    try:
        while True:
            more, known = _begin(driver, stream, jobs, at_once - in_flight)
            yield from known
            in_flight += len(more)
            pending.update((request.id, one) for one in more for request in one.requests)
            if not in_flight:
                return
            for output in _ended(stream, pending):
                in_flight -= 1
                yield output
    finally:
        stream.cancel()


def _begin(
    driver: StreamDriver, stream: EventStream, jobs: Iterator[Job[Result]], room: int
) -> tuple[list[Work[Result]], list[Result]]:
    """Submit jobs until ``room`` are added. Returns them, and the results of jobs that need no
    engine."""
    begun: list[Work[Result]] = []
    known: list[Result] = []
    while len(begun) < room:
        batch = [prepare() for prepare in islice(jobs, room - len(begun))]
        if not batch:
            break
        known += [one.result for one in batch if isinstance(one, Finished)]
        ready = [one for one in batch if not isinstance(one, Finished)]
        errors = driver.submit_to(stream, [one.submission for one in ready])
        for one, error in zip(ready, errors, strict=True):
            if error is None:
                begun.append(one)
            else:
                known.append(one.failed(error))
    return begun, known


def _buffer(
    pending: Mapping[int, Work[Result]], buffered: list[TimedEvent], events: Sequence[TimedEvent]
) -> bool:
    """Buffer events on the engine's thread. Returns False if the reader has to take them now."""
    for _, event in events:
        one = pending.get(event.request_id)
        if event.finish_reason is not None or one is None or one.ends_early:
            return False
    if len(buffered) + len(events) > BUFFERED_EVENTS:
        return False
    buffered.extend(events)
    return True


def _ended(stream: EventStream, pending: dict[int, Work[Result]]) -> Iterator[Result]:
    """The results of the prompts that end with the next events."""
    buffered: list[TimedEvent] = []
    taken = stream.take(WAIT_SECONDS, partial(_buffer, pending, buffered))
    for delivered in (*buffered, *taken):
        one = pending.get(delivered.event.request_id)
        if one is None:
            continue
        try:
            one.take(delivered.event, stream)
            if not one.done:
                continue
            output = one.output(stream)
        except ZincError as error:
            output = one.failed(error)
        numbers = [request.id for request in one.requests]
        stream.release(numbers)
        for number in numbers:
            del pending[number]
        yield output
