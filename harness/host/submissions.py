"""The interface of engines in any thread or process: requests go in, events come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol, TypeVar

from contract.arrays import Floats
from contract.errors import ZincError
from contract.lazy_dataclass import dataclass
from contract.types import Request
from harness.host.answer_text import failure_of
from harness.host.event_queue import TimedEvent
from reference.engine.sequence import LogitsSink
from reference.expert_outputs import ExpertSink
from reference.runner import LOGITS
from reference.sched.scores import ScoreSink

if TYPE_CHECKING:
    from harness.host.structured.grammars import TokenMasks

Stream = TypeVar("Stream", bound="Readable")
WAIT_SECONDS = 0.5
"""Seconds of one wait for an event. On some systems Ctrl-C is only noticed between two waits."""
NO_SINKS: Mapping[int, LogitsSink] = {}
NO_MASKS: Mapping[int, TokenMasks] = {}
NO_SCORES: Mapping[int, ScoreSink] = {}
NO_EXPERTS: Mapping[int, ExpertSink] = {}


class EngineStopped(ZincError):
    """The engine accepts no more work: the server shuts down, or its device was lost."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Requests that are accepted together or not at all.

    All receivers are by request id and run on the engine's thread. ``logits`` receive rows of
    ``output`` of every position from ``logits_from`` on; None for the positions that tokens are
    sampled from. A row comes before the event of its token. ``masks`` say which token may come
    next. ``scores`` receive log-probabilities of prompts, ``experts`` the experts used at each
    position."""

    requests: Sequence[Request]
    logits: Mapping[int, LogitsSink] = field(default_factory=dict)
    logits_from: int | None = None
    output: str = LOGITS
    masks: Mapping[int, TokenMasks] = field(default_factory=dict)
    scores: Mapping[int, ScoreSink] = field(default_factory=dict)
    experts: Mapping[int, ExpertSink] = field(default_factory=dict)

    def first_row_of(self, request: Request) -> int:
        """The first position of a request whose row is received."""
        return len(request.prompt) - 1 if self.logits_from is None else self.logits_from


class Readable(Protocol):
    """A stream of events of requests."""

    def take(self, timeout: float) -> list[TimedEvent]:
        """The available events, after waiting up to ``timeout`` seconds for the first."""

    def cancel(self) -> None:
        """Cancel the requests."""


class Submits(Protocol[Stream]):
    """A driver of engines: accepts requests and delivers their events on streams."""

    def open_stream(self) -> Stream:
        """A stream for later requests."""

    def submit_to(
        self, stream: Stream, submissions: Sequence[Submission]
    ) -> list[ZincError | None]:
        """Submit all; returns for each submission the error that refused it, or None. Raises
        EngineStopped."""

    def submit(
        self,
        requests: Sequence[Request],
        logits: Mapping[int, LogitsSink] = NO_SINKS,
        masks: Mapping[int, TokenMasks] = NO_MASKS,
        scores: Mapping[int, ScoreSink] = NO_SCORES,
        output: str = LOGITS,
        experts: Mapping[int, ExpertSink] = NO_EXPERTS,
    ) -> Stream:
        """Submit requests that belong together, on a new stream; see ``Submission``. Raises
        RequestError, QueueFull and EngineStopped."""
        stream = self.open_stream()
        submission = Submission(
            requests, logits, output=output, masks=masks, scores=scores, experts=experts
        )
        self.begin(stream, submission)
        return stream

    def begin(self, stream: Stream, submission: Submission) -> None:
        """Submit. Raises RequestError, QueueFull and EngineStopped."""
        (error,) = self.submit_to(stream, [submission])
        if error is not None:
            raise error

    def read(self, submission: Submission, look: Callable[[], None] = lambda: None) -> None:
        """Compute requests whose results go only to receivers, and wait for their end. ``look`` is
        called again and again meanwhile. Raises RequestError, QueueFull, EngineStopped, and
        NonFiniteLogits if the model fails."""
        stream = self.open_stream()
        left = {request.id for request in submission.requests}
        try:
            self.begin(stream, submission)
            while left:
                events = stream.take(WAIT_SECONDS)
                look()
                for _, event in events:
                    failure = failure_of(event)
                    if failure is not None:
                        raise failure
                    if event.finish_reason is not None:
                        left.discard(event.request_id)
        finally:
            stream.cancel()


@dataclass(frozen=True, slots=True)
class BothSinks:
    """Passes rows to two receivers, one after the other."""

    first: LogitsSink
    second: LogitsSink

    def __call__(self, position: int, logits: Floats) -> None:
        """Pass rows from ``position`` on."""
        self.first(position, logits)
        self.second(position, logits)


def joined_sinks(
    first: Mapping[int, LogitsSink], second: Mapping[int, LogitsSink]
) -> Mapping[int, LogitsSink]:
    """The receiver of each request's rows: that of one mapping, or both, one after the other."""
    if not (first and second):
        return first or second
    return {request_id: BothSinks(sink, second[request_id]) for request_id, sink in first.items()}


@dataclass(frozen=True, slots=True)
class EndMessages:
    """Messages for clients: of a ``closed`` engine, the ``remedy`` after a failure, and that after
    the model's file was ``changed``."""

    closed: str = "the server is shutting down"
    remedy: str = "restart the server"
    changed: str = "send the request again, and restart the server if the model does not answer"
