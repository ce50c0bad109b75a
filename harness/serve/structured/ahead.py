"""Masks computed beside the engine's thread, while it steps for others.

A mask takes some microseconds, and now and then, where a grammar comes to something new, a good
part of a second. The engine's thread waits for the first kind only; a request whose mask is late
sits out steps until it is there. Its tokens are the same whenever that is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property

from harness.serve.structured.grammars import TokenMasks

WORKERS = max(2, min(8, os.cpu_count() or 1))
IN_TIME_SECONDS = 0.002
"""How long a step waits for masks of all its requests."""


class MasksAhead:
    """The masks of requests under way. All methods are for the engine's thread; ``arrived`` is
    called on another one, with the id of a request whose mask was late and is there."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = arrived
        self._masks: dict[int, TokenMasks] = {}
        self._jobs: dict[int, Future[None]] = {}
        self.late: set[int] = set()
        """Requests that wait for a mask, and are to sit out steps."""

    def add(self, request_id: int, masks: TokenMasks) -> None:
        """A request with masks, the first of which is there."""
        self._masks[request_id] = masks

    def forget(self, request_id: int) -> None:
        """A request ended, or will."""
        self._masks.pop(request_id, None)
        self._jobs.pop(request_id, None)
        self.late.discard(request_id)

    def received(self, request_id: int, token: int) -> None:
        """A request has one more token."""
        masks = self._masks.get(request_id)
        if masks is not None:
            self._jobs[request_id] = self._pool.submit(masks.follow, token)

    def settle(self, seconds: float = IN_TIME_SECONDS) -> list[int]:
        """Wait so long for the masks that are computed now: the requests whose are late since."""
        if not self._jobs:
            return []
        wait(self._jobs.values(), seconds)
        open_jobs = {key: job for key, job in self._jobs.items() if not job.done()}
        self._jobs = open_jobs
        new = [request_id for request_id in open_jobs if request_id not in self.late]
        self.late.update(new)
        for request_id in new:
            open_jobs[request_id].add_done_callback(self._tell(request_id))
        return new

    def settled(self, request_id: int) -> bool:
        """A late mask arrived; False when nobody waits for it any more."""
        waited = request_id in self.late
        self.late.discard(request_id)
        self._jobs.pop(request_id, None)
        return waited

    def close(self) -> None:
        """Start no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _tell(self, request_id: int) -> Callable[[Future[None]], None]:
        return lambda job: self._arrived(request_id)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(WORKERS, thread_name_prefix="masks")
