"""The files that hold a prompt's pages, read by several threads while the engine computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from contract.types import Clock
from reference.memory.disk.entry import Bytes, Entry


class Reading:
    """Reads the files in ``pages``, in order, as far as they are there and valid.

    For a model with recurrent layers ``states`` has the state after each page: then the pages end
    where a valid state is. ``has`` says whether there is a file, ``read`` gives the payload of a
    valid one and None for any other. Any number of threads call ``work``; ``done`` is called by the
    last one.
    """

    def __init__(
        self,
        pages: Sequence[Entry],
        states: Sequence[Entry] | None,
        first: int,
        has: Callable[[Entry], bool],
        read: Callable[[Entry], Bytes | None],
        done: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.first = first
        """The number in its sequence of the first page."""
        self.pages: list[Bytes] = []
        self.state: Bytes | None = None
        self.finished = False
        self.active = 0
        """Threads that work on it now."""
        self._entries, self._states = pages, states
        self._has, self._read, self._done = has, read, done
        self._clock = clock
        # No thread holds the lock while it waits for the disk; the plan is made under its own.
        self._lock, self._planning = threading.Lock(), threading.Lock()
        self._found: dict[int, Bytes] = {}
        self._next = 0
        self._stop: int | None = None
        self._cancelled = False
        self._moved = clock()

    def overdue(self, seconds: float) -> bool:
        """Whether nothing was read for so many seconds."""
        return not self.finished and self._clock() - self._moved > seconds

    def cancel(self) -> None:
        """End it without a result."""
        with self._lock:
            self._cancelled = self.finished = True
            self._found = {}
            self.pages, self.state = [], None

    def cut(self) -> None:
        """End it with the pages read so far; none where a state is needed after them."""
        with self._lock:
            if not self.finished:
                self._finish()

    def work(self) -> None:
        """Read until nothing is left, together with other threads."""
        with self._lock:
            self.active += 1
        try:
            with self._planning:
                if self._stop is None:
                    self._stop = self._count()
            while (index := self._take()) is not None:
                data = self._read(self._entries[index])
                with self._lock:
                    self._moved = self._clock()
                    if data is None:
                        self._stop = index if self._stop is None else min(index, self._stop)
                    elif not self._cancelled:
                        self._found[index] = data
        finally:
            with self._lock:
                self.active -= 1
                last = not self.active and not self.finished
        if last:
            self._end()

    def _take(self) -> int | None:
        """The number of the next page to read, None where there is none."""
        with self._lock:
            if self.finished or self._stop is None or self._next >= self._stop:
                return None
            self._next += 1
            return self._next - 1

    def _count(self) -> int:
        """The number of pages to read: up to the last state where states are needed. Where none is,
        the first file that cannot be read ends it."""
        if self._states is None:
            return len(self._entries)
        count = 0
        for entry in self._entries:
            if not self._has(entry):
                break
            count += 1
        while count and not self._has(self._states[count - 1]):
            count -= 1
        return count

    def _end(self) -> None:
        state, count = None, self._whole()
        if self._states is not None:
            while count:
                entry = self._states[count - 1]
                state = self._read(entry) if self._has(entry) else None
                if state is not None:
                    break
                count -= 1
        with self._lock:
            if not self.finished:
                self._finish(count, state)
        self._done()

    def _whole(self) -> int:
        """The number of pages that were read without a gap."""
        count = 0
        while count in self._found:
            count += 1
        return count

    def _finish(self, count: int | None = None, state: Bytes | None = None) -> None:
        if count is None:
            count = self._whole() if self._states is None else 0
        self.pages = [self._found[index] for index in range(count)]
        self.state = state
        self._found = {}
        self.finished = True
