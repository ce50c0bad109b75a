"""Reads the files of a prompt's pages in several threads while the engine computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from contract.arrays import Bytes
from contract.types import Clock
from reference.memory.disk.entry import Entry
from reference.memory.row_copies import RowBlock


class Ring:
    """At most ``max_bytes`` of blocks of equal size, at least two, reused in turn. ``make``
    allocates one more; any thread calls it."""

    def __init__(self, make: Callable[[], RowBlock], max_bytes: int) -> None:
        self._make = make
        self._blocks = [make()]
        rows = self._blocks[0].rows
        self.block_pages = len(rows)
        """The number of pages in a block."""
        count = max_bytes // max(1, self.block_pages * rows[0].nbytes)
        self.blocks = max(2, count)
        """The most blocks."""

    @property
    def pages(self) -> int:
        """The number of pages for which there is room."""
        return self.blocks * self.block_pages

    def block(self, index: int) -> RowBlock:
        """The block of page ``index``, for one thread at a time."""
        number = index // self.block_pages % self.blocks
        while len(self._blocks) <= number:
            self._blocks.append(self._make())
        return self._blocks[number]


class Reading:
    """Reads the files of ``pages`` into ``ring``, in order, up to the first that is missing or
    invalid.

    For a model with recurrent layers, ``states`` are the files of the states after each page; then
    the pages end at the last valid state. ``has`` says whether a file exists. ``read`` puts the
    payload of a valid page into memory, or returns that of a valid state; it returns None for any
    other file. Any number of threads call ``work``, which returns when the ring is full.
    ``changed`` is called when a block can be loaded, and at the end. The caller loads what has
    ``arrived``, and then frees it."""

    def __init__(
        self,
        pages: Sequence[Entry],
        states: Sequence[Entry] | None,
        first: int,
        ring: Ring,
        has: Callable[[Entry], bool],
        read: Callable[[Entry, Bytes | None], Bytes | None],
        changed: Callable[[], None],
        clock: Clock,
    ) -> None:
        self.first = first
        """The number in its sequence of the first page."""
        self.state: Bytes | None = None
        self.finished = False
        """Whether nothing more is read; what was read may have to be loaded."""
        self.active = 0
        """Threads that work on it now."""
        self.count = 0
        """Pages that can be used, once it is finished."""
        self._entries, self._states, self._ring = pages, states, ring
        self._has, self._read, self._changed = has, read, changed
        self._clock = clock
        # No thread holds this lock while it waits for the disk; the plan has its own lock.
        self._lock, self._planning = threading.Lock(), threading.Lock()
        self._found: set[int] = set()
        self._whole = 0
        self.taken = 0
        """Pages whose loads were submitted."""
        self._freed = 0
        self._next = 0
        self._stop: int | None = None
        self._ending = False
        self._moved = clock()

    @property
    def ready(self) -> bool:
        """Whether it has ended or continues only when pages are loaded."""
        return self.finished or self._whole >= self._freed + self._ring.pages

    @property
    def over(self) -> bool:
        """Whether everything was read and loaded."""
        return self.finished and self.taken >= self.count

    def overdue(self, seconds: float) -> bool:
        """Whether the disk has given nothing for ``seconds``."""
        return not self.ready and self._clock() - self._moved > seconds

    def cancel(self) -> None:
        """End without a result."""
        with self._lock:
            self.finished, self.count, self.state = True, 0, None

    def cut(self) -> None:
        """End with the pages read so far; none if a state after them is needed."""
        with self._lock:
            self._finish(self._whole if self._states is None else 0, None)

    def arrived(self) -> tuple[RowBlock, int] | None:
        """The block of the next pages to load, and their number: all of the block, or the last
        pages; None if they were not read yet."""
        with self._lock:
            stop = self.taken + self._ring.block_pages
            if self.finished:
                stop = min(stop, self.count)
            if not self.taken < stop <= self._whole:
                return None
            return self._ring.block(self.taken), stop - self.taken

    def take(self, pages: int) -> None:
        """Record that ``pages`` arrived pages are being loaded."""
        self.taken += pages

    def free(self, pages: int) -> None:
        """Give back the block of ``pages`` pages, the first of those taken."""
        with self._lock:
            self._freed += pages
            self._moved = self._clock()

    def work(self) -> None:
        """Read until the ring is full or nothing is left, together with other threads."""
        with self._lock:
            self.active += 1
        try:
            with self._planning:
                if self._stop is None:
                    self._stop = self._plan()
            while (taken := self._take()) is not None:
                index, memory = taken
                self._note(index, self._read(self._entries[index], memory) is not None)
        finally:
            with self._lock:
                self.active -= 1
                left = self._stop is not None and self._next < self._stop
                last = not (self.active or self.finished or left or self._ending)
                self._ending = self._ending or last
        if last:
            self._end()

    def _take(self) -> tuple[int, Bytes] | None:
        """The number of the next page to read, and its memory; None if there is none now."""
        with self._lock:
            index = self._next
            limit = self._freed + self._ring.pages
            if self.finished or self._stop is None or index >= min(self._stop, limit):
                return None
            self._next += 1
            return index, self._ring.block(index).rows[index % self._ring.block_pages]

    def _note(self, index: int, valid: bool) -> None:
        with self._lock:
            self._moved = self._clock()
            if not valid:
                self._stop = index if self._stop is None else min(index, self._stop)
                return
            before = self._whole // self._ring.block_pages
            self._found.add(index)
            while self._whole in self._found:
                self._found.remove(self._whole)
                self._whole += 1
            filled = self._whole // self._ring.block_pages > before
        if filled:
            self._changed()

    def _plan(self) -> int:
        """The number of pages to read: up to the last state, if states are needed. Otherwise the
        first file that cannot be read ends it."""
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
        state, count = None, self._whole
        if self._states is not None:
            while count:
                entry = self._states[count - 1]
                state = self._read(entry, None) if self._has(entry) else None
                if state is not None:
                    break
                count -= 1
        with self._lock:
            self._finish(count, state)
        self._changed()

    def _finish(self, count: int, state: Bytes | None) -> None:
        if not self.finished:
            self.finished, self.count, self.state = True, count, state
