"""Requests that have arrived at a server and are still being read.

Reading a request takes the interpreter lock, and so does planning a step. If an idle engine began
with the first of many requests, the others would be read beside its steps, a few for each, and
computed in many small steps instead of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

GATHER_SECONDS = 0.06
"""Longest time that an idle engine waits for requests that are being read."""
PROGRESS_SECONDS = 0.003
"""It stops waiting when none was read for this long."""


class Waits(Protocol):
    """A condition, whose lock the caller holds."""

    def wait(self, timeout: float) -> bool:
        """Wait to be notified."""


class Arrivals:
    """Counts the requests that are being read. Thread-safe; a thread reads one at a time."""

    def __init__(self) -> None:
        self.more: Callable[[], bool] = lambda: False
        """Whether others are arriving, which nobody has begun to read."""
        self.gathering = False
        """Whether an engine waits for them."""
        self._lock = threading.Lock()
        self._reading = 0
        self._changes = 0
        self._submitted = False
        self._here = threading.local()

    def arrived(self) -> None:
        """A request arrived, which some thread will read."""
        with self._lock:
            self._reading += 1
            self._changes += 1

    def begin(self) -> None:
        """The current thread reads one that arrived."""
        self._here.reads = True

    def end(self) -> None:
        """The current thread has read it, or refuses it."""
        if getattr(self._here, "reads", False):
            self._here.reads = False
            with self._lock:
                self._reading -= 1
                self._changes += 1

    def submit(self) -> bool:
        """The current thread submits what it read. Returns whether the engine need not be woken,
        since it waits for others."""
        self._submitted = True
        self.end()
        return self.gathering and self._reading > 0

    def gather(self, changed: Waits) -> None:
        """If a request was submitted, wait until all have been read. One request alone is never
        waited for."""
        if not self._submitted:
            return
        self._submitted = False
        until = time.monotonic() + GATHER_SECONDS
        self.gathering = True
        while self._reading or self.more():
            before = self._changes
            changed.wait(PROGRESS_SECONDS)
            if self._changes == before or time.monotonic() > until:
                break
        self.gathering = self._submitted = False
