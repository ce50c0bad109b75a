"""What an engine tells whoever watches it: every decision about a request, and every step read.

An observer decides nothing: the engine's work is the same with any of them. All times are seconds
of the engine's own clock, so a simulated run is observed in simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from contract.types import FinishReason, Request
from reference.sched.planner import Chunk


class StepObservation(NamedTuple):
    """A step that was read: submitted at ``began``, its tokens known at ``ended``, in seconds.

    ``number`` counts the engine's steps from 0. ``chunks`` are what it computed, and
    ``requests`` the ids of the requests they were computed for, whatever their slots hold by
    now. ``waiting`` requests, ``free_pages`` that nobody held and ``cached_pages`` that only the
    prefix cache kept are as they were when the step was submitted.
    """

    number: int
    began: float
    ended: float
    chunks: Sequence[Chunk]
    requests: Sequence[int]
    waiting: int
    free_pages: int
    cached_pages: int


class Observer(Protocol):
    """Called by an engine, in order, on the thread that calls the engine; must not raise."""

    def submitted(self, at: float, request: Request) -> None:
        """The request was accepted and waits."""

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """The request has ``slot``. ``known`` tokens are given, prompt and what was generated
        before a preemption, of which the prefix cache had the first ``reused``."""

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        """The request lost its slot and waits again, with ``known`` tokens."""

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        """The request ended, cancelled ones too; ``slot`` is None if it waited."""

    def step(self, step: StepObservation) -> None:
        """A step was read. Steps are told in the order they were submitted."""


class NullObserver:
    """Watches nothing."""

    def submitted(self, at: float, request: Request) -> None:
        """Nothing."""

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """Nothing."""

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        """Nothing."""

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        """Nothing."""

    def step(self, step: StepObservation) -> None:
        """Nothing."""


NOBODY: Observer = NullObserver()
"""The observer of an engine that none watches."""
