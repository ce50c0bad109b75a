"""Cancels the steps that the engine's thread waits for, once nobody needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

from contract.cancel_token import CancelToken
from contract.errors import StepAbandoned


class Awaited(NamedTuple):
    """A step in flight: its token, and the ids of all requests that it computes for."""

    token: CancelToken
    requests: list[int]


class StepCancels:
    """Any thread may say that requests are ``leaving``: that they are cancelled before the next
    step. Steps are cancelled only while the engine's thread is in ``waiting``, so nothing of the
    engine changes meanwhile."""

    def __init__(self) -> None:
        # Reentrant, since a signal handler may say it at any line.
        self._lock = RLock()
        self._leaving: set[int] = set()
        self._awaited: tuple[Awaited, ...] = ()

    def add(self, request_ids: Iterable[int]) -> None:
        """Note that requests are leaving."""
        with self._lock:
            self._leaving.update(request_ids)
            self._cancel_unneeded()

    def discard(self, request_id: int) -> None:
        """Note that a request has ended."""
        with self._lock:
            self._leaving.discard(request_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._leaving

    @contextmanager
    def waiting(self, steps: Iterable[Awaited]) -> Iterator[None]:
        """Cancel ``steps``, now or while the context lasts, once all requests of all of them are
        leaving. Then raises StepAbandoned, whether they ended before or not."""
        with self._lock:
            self._awaited = tuple(steps)
            self._cancel_unneeded()
        try:
            yield
        finally:
            with self._lock:
                awaited, self._awaited = self._awaited, ()
        for step in awaited:
            if step.token.cancelled:
                raise StepAbandoned("the steps in flight were abandoned")

    def _cancel_unneeded(self) -> None:
        needed = [step for step in self._awaited if not self._leaving.issuperset(step.requests)]
        for step in () if needed else self._awaited:
            step.token.cancel()
