"""Counts the tokens of a request that came from the prefix cache."""

from __future__ import annotations

from contract.types import FinishReason, Request
from reference.memory.prefix import Difference
from reference.observer import Observer, StepObservation


class PrefixWatch(Observer):
    """An observer that counts reused tokens, and passes everything on to another observer."""

    def __init__(self, then: Observer) -> None:
        self._then = then
        self._request_id = -1
        self._reused = 0

    def reused(self, request_id: int) -> int:
        """The prompt tokens of the latest admitted request that were not computed again."""
        return self._reused if request_id == self._request_id else 0

    def submitted(self, at: float, request: Request) -> None:
        """Pass it on."""
        self._then.submitted(at, request)

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """Note the count of a request's first admission."""
        if request_id != self._request_id:
            self._request_id, self._reused = request_id, reused
        self._then.admitted(at, request_id, slot, known, reused)

    def differed(self, at: float, request_id: int, difference: Difference) -> None:
        """Pass it on."""
        self._then.differed(at, request_id, difference)

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        """Pass it on."""
        self._then.preempted(at, request_id, slot, known)

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        """Pass it on."""
        self._then.finished(at, request_id, slot, reason)

    def step(self, step: StepObservation) -> None:
        """Pass it on."""
        self._then.step(step)
