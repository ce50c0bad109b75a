"""Records facts about an engine's requests and steps, on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import field
from typing import Protocol

from contract.lazy_dataclass import dataclass
from contract.types import FinishReason, Request
from harness.host.step_times import StepTimes
from reference.memory.prefix import Difference
from reference.observer import NO_OBSERVER, Observer, StepObservation
from reference.usage import TenantCounters


@dataclass(slots=True)
class RequestFacts:
    """The history of one request; times are ``time.monotonic`` seconds. The engine's thread writes
    it.

    ``counts``: counters of its tenant, if the engine is in this process. ``cached``: prompt tokens
    from the prefix cache at its first admission, ``from_disk`` of them from the disk cache.
    ``difference``: where the prompt differs from a cached one of its tenant. ``tokens``: events
    with a token on its stream, including those past the end of its answer until the reader cancels
    the request."""

    submitted: float
    admitted: float | None = None
    cached: int = 0
    from_disk: int = 0
    difference: Difference | None = None
    preempted: int = 0
    tokens: int = 0
    counts: TenantCounters | None = None


class Listener(Protocol):
    """Observes every step on the engine's thread, before the step's events are delivered."""

    def stepped(self, seconds: float, tokens: int) -> None:
        """A step of ``tokens`` query tokens took ``seconds``, not counting the time in which an
        earlier step still ran."""


class FactsByRequest(Protocol):
    """A stream with the facts of its requests."""

    @property
    def facts(self) -> Mapping[int, RequestFacts]:
        """The facts by request id."""


@dataclass(slots=True)
class StreamWatch(Observer):
    """Records admission and preemption of requests of ``streams``, and the time of steps. Passes
    everything on to the observer ``then``."""

    streams: Mapping[int, FactsByRequest]
    then: Observer = NO_OBSERVER
    listener: Listener | None = None
    read_at: float = 0.0
    times: StepTimes = field(default_factory=StepTimes)

    def submitted(self, at: float, request: Request) -> None:
        self.then.submitted(at, request)

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        self.then.finished(at, request_id, slot, reason)

    def step(self, step: StepObservation) -> None:
        seconds = step.ended - max(step.began, self.read_at)
        tokens = sum(count for _, _, count in step.chunks)
        self.times.note(seconds, tokens)
        if self.listener is not None:
            self.listener.stepped(seconds, tokens)
        self.read_at = step.ended
        self.then.step(step)

    def differed(self, at: float, request_id: int, difference: Difference) -> None:
        stream = self.streams.get(request_id)
        if stream is not None and stream.facts[request_id].admitted is None:
            stream.facts[request_id].difference = difference
        self.then.differed(at, request_id, difference)

    def loaded(self, at: float, request_id: int, tokens: int) -> None:
        stream = self.streams.get(request_id)
        facts = None if stream is None else stream.facts[request_id]
        if facts is not None and not facts.from_disk and not facts.preempted:
            facts.from_disk = tokens
            facts.cached += 0 if facts.admitted is None else tokens
        self.then.loaded(at, request_id, tokens)

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        stream = self.streams.get(request_id)
        if stream is not None and stream.facts[request_id].admitted is None:
            stream.facts[request_id].admitted = time.monotonic()
            stream.facts[request_id].cached = reused
        self.then.admitted(at, request_id, slot, known, reused)

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        stream = self.streams.get(request_id)
        if stream is not None:
            stream.facts[request_id].preempted += 1
        self.then.preempted(at, request_id, slot, known)
