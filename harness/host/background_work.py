"""Work of requests on other threads, while the engine's thread computes steps for others.

A mask takes some microseconds, and now and then, where a grammar comes to something new, a good
part of a second. The engine's thread waits for short work only; a request whose work is late sits
out steps until it is done. Its tokens are the same whenever that is."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from harness.host.structured.grammars import TokenMasks

WORKERS = max(2, min(8, os.cpu_count() or 1))
IN_TIME_SECONDS = 0.002
"""How long a step waits for the work of all its requests."""


class BackgroundWork:
    """The work for requests under way, at most one piece for each. All methods are for the engine's
    thread; ``done`` is called on another one, with the id of a request whose work was late and is
    done."""

    def __init__(self, done: Callable[[int], None]) -> None:
        self._done = done
        self._masks: dict[int, tuple[TokenMasks, list[int]]] = {}
        self._jobs: dict[int, Future[None]] = {}
        self.late: set[int] = set()
        """Requests that wait for work, and are to sit out steps."""

    def add(self, request_id: int, masks: TokenMasks) -> None:
        """A request with masks, the first of which is there."""
        self._masks[request_id] = masks, []

    def forget(self, request_id: int) -> None:
        """A request ended, or will."""
        self._masks.pop(request_id, None)
        self._jobs.pop(request_id, None)
        self.late.discard(request_id)

    def received(self, request_id: int, token: int) -> None:
        """A request has one more token."""
        entry = self._masks.get(request_id)
        if entry is not None:
            masks, tokens = entry
            tokens.append(token)
            # Jobs of one request may change places, so each is given all tokens.
            self.start(request_id, partial(masks.follow, tokens.copy()))

    def start(self, request_id: int, work: Callable[[], None]) -> None:
        """Something to do for a request, of which nothing is under way."""
        self._jobs[request_id] = self._pool.submit(work)

    def settle(self, seconds: float = IN_TIME_SECONDS) -> list[int]:
        """Wait so long for what was begun since the last call: the requests that are late now."""
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
        """The work of a late request was done; False when nobody waits for it any more, or when
        more of it has begun."""
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
