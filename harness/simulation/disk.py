"""A disk cache without a disk and without threads, of which writes and reads fail."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from harness.simulation.clock import VirtualClock
from reference.memory.disk.entry import Entry
from reference.memory.disk.names import PageNames
from reference.memory.disk.statistics import DiskStatistics

LOST_ONE_IN = 6
"""One file of this many is lost or damaged."""
MAX_POLLS = 6
"""Most times that an engine asks for a reading until it has ended."""
TOGETHER, ROOM = 1, 1
"""Pages that are loaded together, and pages that are read and not loaded."""
MAX_QUEUED = 8
"""Pages and states that may wait to be written."""


class SimulatedReading:
    """The ``Reading`` of ``DiskCache.read``: as much of what it found as there is room for comes
    when it was asked for a ``random`` number of times."""

    def __init__(
        self, first: int, random: Random, found: Callable[[], tuple[list[Any], Any]]
    ) -> None:
        self.first = first
        self.count = self.taken = 0
        self.state: Any = None
        self.finished = False
        self._pages: list[Any] | None = None
        self._whole = 0
        self._polls, self._random, self._found = random.randint(0, MAX_POLLS), random, found

    def poll(self) -> bool:
        """Whether it goes on only when pages are loaded, or has ended."""
        self._polls -= 1
        if self._polls < 0 and not self.ready:
            if self._pages is None:
                self._pages, self._state = self._found()
            self._whole = min(len(self._pages), self.taken + ROOM)
            if self._whole == len(self._pages):
                self.finished, self.count, self.state = True, self._whole, self._state
        return self.ready

    @property
    def ready(self) -> bool:
        return self.finished or self._whole >= self.taken + ROOM

    @property
    def over(self) -> bool:
        return self.finished and self.taken >= self.count

    def arrived(self) -> tuple[list[Any], int] | None:
        stop = min(self.taken + TOGETHER, self.count if self.finished else self._whole)
        full = self.finished or stop == self.taken + TOGETHER
        if self._pages is None or stop <= self.taken or not full:
            return None
        return self._pages[self.taken : stop], stop - self.taken

    def take(self, pages: int) -> None:
        self.taken += pages
        self._polls = self._random.randint(0, MAX_POLLS)

    def cancel(self) -> None:
        """End it without a result."""
        self.finished, self.count, self.state = True, 0, None


class SimulatedDisk:
    """The interface of ``DiskCache``; its ``files`` stay where an engine ends, and are those of all
    models."""

    statistics = DiskStatistics()

    def __init__(self, clock: VirtualClock, seed: int, files: dict[str, Any]) -> None:
        self.names = PageNames(b"", str(seed))
        self.before_close: Callable[[], None] = lambda: None
        self.counts = {"written": 0, "read": 0}
        self._clock, self._random = clock, Random(seed)
        self._files = files
        self.queued = 0

    def count(self, **changes: int) -> None:
        """Count nothing."""

    def report(self, text: str, kind: str | None = None) -> None:
        """Report nothing."""

    def touch(self, entries: Sequence[Entry]) -> None:
        """Note no use: no file is removed to make room."""

    def reserve(self, nbytes: int) -> bool:
        """Whether one page or state more may wait to be written."""
        room = self.queued < MAX_QUEUED
        self.queued += room
        return room

    def release(self, nbytes: int) -> None:
        """Take back a reservation."""
        self.queued -= 1

    def write(self, entry: Entry, payload: Any) -> None:
        """Write a file, or lose it."""
        self.release(entry.nbytes)
        if self._random.randrange(LOST_ONE_IN):
            self._files[entry.path] = payload
            self.counts["written"] += 1

    def erase(self, entries: Sequence[Entry]) -> None:
        """Remove files."""
        for entry in entries:
            self._files.pop(entry.path, None)

    def forget(self, scope: Sequence[str | int]) -> None:
        """Remove all files of a scope."""
        folder = self.names.scope(scope) + "/"
        for path in [path for path in self._files if path.startswith(folder)]:
            del self._files[path]

    def read(
        self, pages: Sequence[Entry], states: Sequence[Entry] | None, first: int, block: object
    ) -> SimulatedReading | None:
        """Begin to read the files of a prompt, as far as they are there; None where none is."""
        if pages[0].path not in self._files:
            return None
        return SimulatedReading(first, self._random, lambda: self._found(pages, states))

    def free(self, reading: SimulatedReading, pages: int) -> None:
        """Blocks are not used again here."""

    def _found(
        self, pages: Sequence[Entry], states: Sequence[Entry] | None
    ) -> tuple[list[Any], Any]:
        found: list[Any] = []
        for entry in pages:
            page = self._files.get(entry.path)
            if page is None or not self._random.randrange(4 * LOST_ONE_IN):
                break
            found.append(page)
        state = None
        if states is not None:
            while found and (state := self._files.get(states[len(found) - 1].path)) is None:
                found.pop()
        self.counts["read"] += len(found)
        return found, state

    def due(self, reading: SimulatedReading) -> bool:
        return reading.poll()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._clock.advance(seconds)

    def wait_for_room(self) -> bool:
        """Whether there is time left for the end."""
        return self._random.random() < 0.5
