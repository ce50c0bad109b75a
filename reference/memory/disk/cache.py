"""The prefix cache on disk: one thread writes, others read, and no fault stops the engine.

A page read from disk either has the bytes that were computed for its tokens, or is not used.
Problems are counted, and the first one of each kind is reported as one line. A folder that was
removed is made again."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from contract.arrays import Bytes
from contract.lazy_dataclass import dataclass
from contract.processors import processors
from contract.types import Clock
from reference.memory.disk.entry import BrokenEntry, Entry, read_entry
from reference.memory.disk.folder import CacheFolder
from reference.memory.disk.names import SECRET_BYTES, PageNames
from reference.memory.disk.reading import Reading, Ring
from reference.memory.disk.statistics import DiskStatistics
from reference.memory.row_copies import RowBlock

READERS = min(max(2, 3 * processors() // 4), 12)
"""Threads that read the files of a prompt."""
MAX_TOUCHES = 64
"""While more writes than this are queued, uses of files are not recorded."""
RETRY_SECONDS = 60.0
"""After failures, a write is tried at least this often; once this long has passed without one, that
is reported, and a later failure is, too."""
UNUSABLE, UNWRITABLE = "cannot be used", "cannot be written"
UNWRITTEN = {UNUSABLE, UNWRITABLE}
Report = Callable[[str], None]
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class DiskCacheOptions:
    """The folder of the cache and its limits.

    ``folder`` holds files of at most ``max_bytes`` in all. ``function`` names what the model
    computes. In host memory, at most ``queue_bytes`` wait to be written, and about ``read_bytes``
    of a prompt wait to be loaded. A reading without progress for ``patience`` seconds is given up.
    ``close`` spends at most ``flush_seconds`` on what is still to be written."""

    folder: Path
    max_bytes: int
    function: str
    queue_bytes: int = 256 << 20
    read_bytes: int = 128 << 20
    patience: float = 5.0
    flush_seconds: float = 5.0


class DiskCache:
    """The cache in ``options.folder``. ``report`` is called once for each kind of problem.

    All methods but ``close`` return at once, and none raises because of the disk. One thread calls
    them, which is not one of the cache's own."""

    def __init__(self, options: DiskCacheOptions, report: Report, clock: Clock) -> None:
        self.options = options
        self._report, self._clock = report, clock
        self._changed = threading.Condition()
        self._counts = Counter[str](max_bytes=options.max_bytes)
        self._problem = ""
        self._reported: set[str] = set()
        self._work: deque[Work] = deque()
        self._reserved = 0
        self._unwritten = 0
        self._writing = False
        self._failures = 0
        self._skipped = 0
        self._failed_at = 0.0
        self._forgetting = Counter[str]()
        self._readings: deque[Reading] = deque()
        self._given_up: list[Reading] = []
        self._closing = False
        self._deadline: float | None = None
        self.before_close: Callable[[], None] = lambda: None
        """Is called when the cache closes: what gives it the rest."""
        self._threads: list[threading.Thread] = []
        self._folder: CacheFolder | None = None
        self._secret = os.urandom(SECRET_BYTES)
        try:
            self._folder = CacheFolder(options.folder, options.max_bytes)
            self._secret = self._folder.secret
            self._post(self._folder.count)
        except OSError as error:
            self._failed(UNUSABLE, error)
        self.names = PageNames(self._secret, options.function)

    @property
    def statistics(self) -> DiskStatistics:
        """The counts at this moment."""
        used = 0 if self._folder is None else self._folder.nbytes or 0
        with self._changed:
            return DiskStatistics(**self._counts, used_bytes=used, problem=self._problem)

    def count(self, **changes: int) -> None:
        """Add to counts."""
        with self._changed:
            for name, number in changes.items():
                self._counts[name] += number

    # Writing.

    def reserve(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may wait to be written; they count until written or released."""
        with self._changed:
            empty = not self._reserved
            if self._reserved + nbytes > self.options.queue_bytes and not empty:
                return False
            self._reserved += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Take back a reservation."""
        with self._changed:
            self._reserved -= nbytes
            self._changed.notify_all()

    def write(self, entry: Entry, payload: Bytes) -> None:
        """Write what ``reserve`` made room for, later, in the cache's thread. Nobody may change
        ``payload`` until then."""

        def write() -> None:
            try:
                if not self._forgetting[entry.scope] and self._try_now():
                    written = self._ensure_folder().write(entry, payload)
                    self._succeeded()
                    self.count(written=written, written_bytes=payload.nbytes if written else 0)
                else:
                    self.count(dropped=1)
            except OSError as error:
                self.count(dropped=1)
                self._failures = min(self._failures + 1, 10)
                self._failed(UNUSABLE if self._folder is None else UNWRITABLE, error)
            finally:
                with self._changed:
                    self._unwritten -= 1
                self.release(payload.nbytes)

        with self._changed:
            self._unwritten += 1
        self._post(write)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Record that files were used now, least recent first, unless much else is queued."""
        now, folder = time.time_ns(), self._folder
        if folder is not None and len(self._work) < MAX_TOUCHES:
            self._post(lambda: folder.touch(entries, now))

    def erase(self, entries: Sequence[Entry]) -> None:
        """Remove files, after the writes queued before."""

        def remove() -> None:
            for entry in entries:
                self._remove(entry)

        self._post(remove)

    def forget(self, scope: Sequence[str | int]) -> None:
        """Remove all files of a scope. This process finds none from now on, removed or not."""
        name = self.names.scope(scope)

        def remove() -> None:
            try:
                if self._folder is not None:
                    self._folder.remove_scope(name)
                with self._changed:
                    self._forgetting[name] -= 1
            except OSError as error:
                self._failed("keeps the pages of a removed tenant", error)

        with self._changed:
            self._forgetting[name] += 1
        self._post(remove)

    # Reading.

    def read(
        self,
        pages: Sequence[Entry],
        states: Sequence[Entry] | None,
        first: int,
        block: Callable[[], RowBlock],
    ) -> Reading | None:
        """Start to read the pages of a prompt from page ``first`` on, see ``Reading``; None if
        nothing can be read. ``block`` allocates memory for pages."""
        folder = self._folder
        self._given_up = [reading for reading in self._given_up if reading.active]
        if folder is None or not pages or self._given_up or self._forgetting[pages[0].scope]:
            return None
        ring = Ring(block, self.options.read_bytes)
        reading = Reading(
            pages, states, first, ring, folder.has, self._read, self._notify, self._clock
        )
        self._queue_reading(reading, READERS)
        return reading

    def free(self, reading: Reading, pages: int) -> None:
        """Continue a reading after ``pages`` of its arrived pages were loaded."""
        reading.free(pages)
        if not reading.finished:
            self._queue_reading(reading, min(pages, READERS))

    def due(self, reading: Reading) -> bool:
        """Whether a reading has ended or waits for its pages to be loaded. Ends a reading that
        makes no progress."""
        if reading.overdue(self.options.patience):
            reading.cut()
            self._given_up.append(reading)
            self.report("is too slow to be read; prompts are computed until it answers")
        return reading.ready

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for progress of a reading."""
        with self._changed:
            self._changed.wait(seconds)

    # The end.

    def end_in(self, seconds: float) -> None:
        """Stop writing after ``seconds``."""
        self._deadline = self._clock() + seconds

    def wait_for_room(self) -> bool:
        """Wait until half the queue is free; False if the time for closing is over."""
        with self._changed:
            limit = self.options.queue_bytes // 2
            return self._changed.wait_for(lambda: self._reserved <= limit, self._seconds_left())

    def flush(self) -> bool:
        """Wait until everything given to ``write`` is written; False if the time for closing is
        over before that."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._work and not self._writing, self._seconds_left()
            )

    def close(self) -> None:
        """Write what is queued as long as the time allows, and stop. What could not be written is
        reported: the next process computes it again."""
        if self._closing:
            return
        before = self.statistics.dropped
        self.before_close()
        self.flush()
        with self._changed:
            self._closing = True
            self.count(dropped=self._unwritten)
            self._work.clear()
            self._changed.notify_all()
        if lost := self.statistics.dropped - before:
            self.report(f"lacks {lost:,} pages, for which there was no time at the end", "lacks")

    def _seconds_left(self) -> float:
        """Seconds left for closing, counted from the first call."""
        if self._deadline is None:
            self.end_in(self.options.flush_seconds)
        assert self._deadline is not None
        return max(0.0, self._deadline - self._clock())

    # The cache's threads.

    def _queue_reading(self, reading: Reading, threads: int) -> None:
        with self._changed:
            self._readings.extend([reading] * threads)
            self._start("disk cache reader", self._read_all, READERS)
            self._changed.notify_all()

    def _post(self, work: Work) -> None:
        with self._changed:
            self._work.append(work)
            self._start("disk cache writer", self._write_all, 1)
            self._changed.notify_all()

    def _start(self, name: str, target: Callable[[], None], count: int) -> None:
        if sum(thread.name == name for thread in self._threads) < count:
            for _ in range(count):
                thread = threading.Thread(target=target, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closing)
                if not self._work:
                    return
                work, self._writing = self._work.popleft(), True
            try:
                work()
            finally:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()

    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._readings or self._closing)
                if self._closing:
                    return
                reading = self._readings.popleft()
            reading.work()

    def _read(self, entry: Entry, memory: Bytes | None) -> Bytes | None:
        """The payload of a valid file, in ``memory`` if given; None for any other file."""
        folder = self._folder
        assert folder is not None
        try:
            payload = read_entry(folder.path, entry, folder.secret, memory)
        except BrokenEntry as broken:
            self.count(ignored=1)
            self.report(f"has a file that is not used ({broken.problem}): {entry.path}")
            self._remove(entry)
            return None
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed("cannot be read", error)
            return None
        self.count(read=1, read_bytes=payload.nbytes)
        return payload

    def _remove(self, entry: Entry) -> None:
        """Remove a file that is invalid or erased."""
        try:
            if self._folder is not None:
                self._folder.remove(entry)
        except OSError as error:
            self._failed("keeps a file that is to be removed", error)

    def _ensure_folder(self) -> CacheFolder:
        """The folder, created if that failed before or somebody removed it. Raises OSError, also if
        another process created it: its secret gives pages other names."""
        before = self._folder
        if before is not None and before.path.is_dir():
            return before
        if before is not None and before.is_elsewhere:
            raise OSError(errno.ENODEV, "its file system is gone")
        folder = CacheFolder(self.options.folder, self.options.max_bytes, self._secret)
        if folder.secret != self._secret:
            raise OSError(errno.EEXIST, "another process made it; restart to use it")
        folder.count()
        self._folder = folder
        if before is not None:
            self.report("was removed; it is made again, without what it had")
        return folder

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _try_now(self) -> bool:
        """Whether to write now: after failures, writes are tried less and less often."""
        self._skipped += 1
        early = self._clock() - self._failed_at < RETRY_SECONDS
        if self._failures and early and self._skipped < 1 << self._failures:
            return False
        self._skipped = 0
        return True

    def _succeeded(self) -> None:
        """Note that a write did not fail."""
        self._failures = 0
        self._note_problem("")
        if self._clock() - self._failed_at >= RETRY_SECONDS:
            with self._changed:
                told = self._reported & UNWRITTEN
                self._reported -= UNWRITTEN
            if told:
                self._report(f"the disk cache {self.options.folder} is written again")

    def _failed(self, what: str, error: OSError) -> None:
        self._failed_at = self._clock()
        problem = f"{what}: {error.strerror or error}"
        self._note_problem(problem)
        self.report(f"{problem}; the server goes on without it", what)

    def _note_problem(self, problem: str) -> None:
        with self._changed:
            self._problem = problem

    def report(self, text: str, kind: str | None = None) -> None:
        """Report a problem unless one of its kind was reported. Any thread may call it."""
        kind = text.partition(":")[0] if kind is None else kind
        with self._changed:
            is_new = kind not in self._reported
            self._reported.add(kind)
        if is_new:
            self._report(f"the disk cache {self.options.folder} {text}")
