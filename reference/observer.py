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
    """A completed step: submitted at ``began``, its tokens known at ``ended``, in seconds.

    ``number`` counts the engine's steps from 0. ``chunks`` are what it computed, and ``requests``
    the ids of the requests they belong to, even if their slots hold other requests by now.
    ``waiting`` requests, ``free_pages`` that nothing used and ``cached_pages`` that only the prefix
    cache held are those when the step was submitted."""

    number: int
    began: float
    ended: float
    chunks: Sequence[Chunk]
    requests: Sequence[int]
    waiting: int
    free_pages: int
    cached_pages: int


class Observer:
    """Methods that an engine calls in order, on the thread that calls the engine; they must not
    raise. Here they do nothing."""

    def submitted(self, at: float, request: Request) -> None:
        """The request was accepted and waits."""

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """The request got ``slot``. It has ``known`` tokens (the prompt, and tokens generated
        before a preemption), of which the first ``reused`` came from the prefix cache."""

    def differed(self, at: float, request_id: int, difference: Difference) -> None:
        """A cached sequence of the same tenant begins as the request's and goes on otherwise.
        Reported before ``admitted``."""

    def loaded(self, at: float, request_id: int, tokens: int) -> None:
        """Of the request's tokens, so many came from the disk cache. Reported before ``admitted``,
        or behind it, and then not counted in ``reused``, where pages were read into its slot."""

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        """The request lost its slot and waits again, with ``known`` tokens."""

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        """The request ended or was cancelled; ``slot`` is None if it was waiting."""

    def step(self, step: StepObservation) -> None:
        """A step completed. Steps are reported in the order they were submitted."""


NOBODY = Observer()
"""The observer of an engine that nobody observes."""
