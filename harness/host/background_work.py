"""Computes token masks on other threads, while the engine's thread computes steps.

A mask takes microseconds, but sometimes, at a new state of a grammar, a large part of a second. The
engine's thread waits only briefly. A request whose mask is late skips steps until it is done. Its
tokens do not depend on that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from contract.processors import processors

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from harness.host.structured.grammars import TokenMasks

WORKERS = max(2, min(8, processors()))
IN_TIME_SECONDS = 0.002
"""Longest wait of a step for the masks of all its requests."""


class BackgroundWork:
    """The masks that requests wait for, at most one each. Only the engine's thread calls its
    methods. ``done`` is called on another thread with the id of a request whose late work is
    done."""

    def __init__(self, done: Callable[[int], None]) -> None:
        self._done = done
        self.masked: dict[int, tuple[TokenMasks, list[int]]] = {}
        """The requests with masks, and their tokens."""
        self._jobs: dict[int, Future[None]] = {}
        self.late: set[int] = set()
        """Requests that skip steps, since their work is not done."""

    def add(self, request_id: int, masks: TokenMasks) -> None:
        """Add a request with masks, whose first mask is already computed."""
        self.masked[request_id] = masks, []

    def forget(self, request_id: int) -> None:
        """Drop a request."""
        self.masked.pop(request_id, None)
        self._jobs.pop(request_id, None)
        self.late.discard(request_id)

    def received(self, request_id: int, token: int) -> None:
        """Start the next mask of a request, which got a token."""
        entry = self.masked.get(request_id)
        if entry is not None:
            masks, tokens = entry
            tokens.append(token)
            # Jobs of one request may run in any order, so each gets all tokens.
            self.start(request_id, partial(masks.follow, tokens.copy()))

    def start(self, request_id: int, work: Callable[[], None]) -> None:
        """Start work for a request that has none."""
        self._jobs[request_id] = self._pool.submit(work)

    def settle(self, seconds: float = IN_TIME_SECONDS) -> list[int]:
        """Wait up to ``seconds`` for work started since the last call. Returns the requests that
        became late."""
        begun = {key: job for key, job in self._jobs.items() if key not in self.late}
        if not begun:
            return []
        from concurrent.futures import wait

        wait(begun.values(), seconds)
        new = [request_id for request_id, job in begun.items() if not job.done()]
        for request_id in begun.keys() - set(new):
            del self._jobs[request_id]
        self.late.update(new)
        for request_id in new:
            self._notify(request_id)
        return new

    def settled(self, request_id: int) -> bool:
        """To be called when late work is done. Returns whether the request can continue: not if it
        ended or has new work."""
        if request_id not in self.late:
            return False
        if not self._jobs[request_id].done():
            self._notify(request_id)
            return False
        self.late.discard(request_id)
        del self._jobs[request_id]
        return True

    def close(self) -> None:
        """Start no more work."""
        if "_pool" in vars(self):
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _notify(self, request_id: int) -> None:
        self._jobs[request_id].add_done_callback(lambda job: self._done(request_id))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(WORKERS, thread_name_prefix="masks")
