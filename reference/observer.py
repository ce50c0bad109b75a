"""The interface of observers: an engine reports every decision about a request and every step.

An observer does not influence the engine. All times are seconds of the engine's own clock, so a
simulated run is observed in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contract.types import FinishReason, Request
from reference.memory.prefix import Difference
from reference.sched.planner import Chunk


class StepObservation(NamedTuple):
    """A completed step: submitted at ``began``, its results read at ``ended``, in seconds.

    ``number`` counts the engine's steps from 0. ``chunks`` are the parts of sequences it computed;
    ``requests`` has the id of the request of each chunk, whose slot may hold another request by
    now. The last three are counts when the step was submitted: ``waiting`` requests,
    ``free_pages`` that nothing used, and ``cached_pages`` that only the prefix cache held."""

    number: int
    began: float
    ended: float
    chunks: Sequence[Chunk]
    requests: Sequence[int]
    waiting: int
    free_pages: int
    cached_pages: int


class Observer:
    """The methods an engine calls, one after the other, on the thread that calls the engine; those
    of this class do nothing. They must not raise. ``at`` is the time in seconds."""

    def submitted(self, at: float, request: Request) -> None:
        """The request was accepted and waits."""

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """The request got ``slot``. It has ``known`` tokens (the prompt, and tokens generated
        before a preemption), of which the first ``reused`` came from the prefix cache."""

    def differed(self, at: float, request_id: int, difference: Difference) -> None:
        """A cached sequence that the tenant may share begins like the request's tokens, up to the
        position of ``difference``. Reported before ``admitted``."""

    def loaded(self, at: float, request_id: int, tokens: int) -> None:
        """The first ``tokens`` tokens of the request came from the disk cache. Reported before
        ``admitted``; or after it, when pages were read into the request's slot, and then
        ``reused`` did not count them."""

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        """The request lost its slot and waits again, with ``known`` tokens."""

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        """The request ended or was cancelled; ``slot`` is None if it was waiting."""

    def step(self, step: StepObservation) -> None:
        """A step completed. Steps are reported in the order they were submitted."""


NO_OBSERVER = Observer()
"""The observer of an engine that nobody observes."""
