"""Files that a server has to write before it answers, and what happens while it cannot."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from contract.context_manager import ContextManager
from contract.errors import ConfigError, ZincError, system_words

BUSY_SECONDS = 10.0
"""Longest wait of a change for another process."""
BUSY_MILLISECONDS = 20
"""Milliseconds of this wait in one piece with the lock, which readers need too."""
RETRY_SECONDS = 1.0
"""Seconds between two tries."""
LOG_SECONDS = 60.0
RESERVED_FRACTION = 0.125
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
UNHURT = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""SQLite's error codes for a damaged file, and for a file that cannot be changed now."""
log = logging.getLogger("zinc_rt.serve")


class StorageProblem(ZincError):
    """A file cannot be written now. ``full``: its disk is full."""

    def __init__(self, problem: str, full: bool) -> None:
        self.full = full
        super().__init__(problem)


class _Connection(sqlite3.Connection):
    """A connection that waits while another process restores the file, whose last user was killed:
    nobody can read it meanwhile."""

    def execute(self, *given: Any) -> sqlite3.Cursor:
        late = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return super().execute(*given)
            except sqlite3.OperationalError as error:
                restored = error.sqlite_errorcode == sqlite3.SQLITE_BUSY_RECOVERY
                if not restored or time.monotonic() >= late:
                    raise


def _is_busy(error: sqlite3.Error) -> bool:
    """Whether another process uses the file, for whatever it does."""
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


class Database(ContextManager):
    """An SQLite file with ``tables`` that threads and processes share; in memory if ``path`` is
    None.

    Only its owner can read a new file. A file that breaks, or is removed or replaced, is opened
    again. On a full disk it can still be read. Deleted content is overwritten with zeros.
    ``refused`` names in the log what is refused meanwhile."""

    refused = "new requests"

    def __init__(
        self, path: Path | None, version: int, what: str, option: str, tables: Iterable[str]
    ) -> None:
        """Raises ConfigError. It names ``option``, the option that sets the path."""
        self._lock = threading.Lock()
        self._path, self._what, self._version = path, what, version
        self._tables, self._remedy = tuple(tables), f"name another with {option}"
        self._problem: StorageProblem | None = None
        self._log = ProblemLog(self.refused)
        self._tried = float("-inf")
        try:
            self._file = self._opened()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"{path}: cannot be {what}: {system_words(error)}; {self._remedy}"
            ) from None

    def _opened(self) -> sqlite3.Connection:
        """Open the file, or create it."""
        self._broken, self._looked = sqlite3.SQLITE_OK, time.monotonic()
        if self._path is None:
            return self._connected(":memory:")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        self._state = os.fstat(opened)
        os.close(opened)
        try:
            return self._connected(self._path)
        except sqlite3.OperationalError as error:
            if not self._state.st_size or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_IOERR:
                raise
            # No room for the index that processes share: it is in memory, and no other reads.
            self._broken = sqlite3.SQLITE_IOERR
            return self._connected(self._path, "EXCLUSIVE")

    def _connected(self, name: Path | str, locking: str = "NORMAL") -> sqlite3.Connection:
        file = sqlite3.connect(
            name,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
        )
        try:
            file.execute(f"PRAGMA locking_mode={locking}")
            found = file.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, self._version):
                raise ConfigError(
                    f"{name}: has version {found} of {self._what}, not {self._version}"
                )
            listed = "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite%'"
            own = {table.partition("(")[0].split()[-1] for table in self._tables}
            if {table for (table,) in file.execute(listed)} - own:
                raise ConfigError(f"{name}: is another program's database; {self._remedy}")
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("PRAGMA synchronous=NORMAL")
            file.execute("PRAGMA secure_delete=ON")
            for table in self._tables:
                file.execute(table)
            if not found:
                file.execute(f"PRAGMA user_version={self._version}")
            file.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
        except BaseException:
            file.close()
            raise
        return file

    def _look(self) -> None:
        """Reopen the file if it broke, or was removed or replaced. Checks at most every
        RETRY_SECONDS. Raises sqlite3.Error."""
        now = time.monotonic()
        if self._path is None or now - self._looked < RETRY_SECONDS:
            return
        self._looked = now
        try:
            kept = os.path.samestat(self._path.stat(), self._state)
        except OSError:
            kept = False
        broke = self._broken if kept else sqlite3.SQLITE_OK
        if kept and not broke:
            return
        if not kept:
            log.error("%s was removed or replaced: it is opened again", self._path)
        self._file.close()
        try:
            self._file = self._opened()
        except (OSError, ConfigError) as error:
            raise sqlite3.OperationalError(str(error)) from None
        if broke in DAMAGED and self._file.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            self._broken = broke
            raise sqlite3.DatabaseError("database disk image is malformed; move it away")

    @contextmanager
    def _transaction(self, seconds: float | None = None) -> Iterator[None]:
        """A transaction. The caller holds the lock. While another process has the file, this
        releases the lock between tries, for up to ``seconds`` or BUSY_SECONDS."""
        late = time.monotonic() + (BUSY_SECONDS if seconds is None else seconds)
        while True:
            self._look()
            try:
                self._file.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() >= late:
                    raise
            self._lock.release()
            time.sleep(BUSY_MILLISECONDS / 1000)
            self._lock.acquire()
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Holds the lock. Turns SQLite's errors in the block into StorageProblem."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise self._problem_of(error) from None

    def check(self) -> None:
        """Raises StorageProblem while the file cannot be written. Tries a write after RETRY_SECONDS
        without one, so that a full disk is noticed before a request is computed."""
        if self._late():
            with self._lock:
                if self._late():
                    self._try()
        problem = self._problem
        if problem is not None:
            raise problem

    def _late(self) -> bool:
        return time.monotonic() - self._tried >= RETRY_SECONDS

    def _try(self) -> None:
        """Write pending changes. The caller holds the lock."""
        self._tried = time.monotonic()
        try:
            self._write()
        except (sqlite3.Error, OSError) as error:
            self._note(self._problem_of(error))
        else:
            self._note(None)

    def _write(self) -> None:
        """Write the version again, as a test."""
        self._apply([(f"PRAGMA user_version={self._version}", ())])

    def _apply(self, changes: Sequence[tuple[str, Sequence[object]]]) -> None:
        """Execute all changes in one transaction; the caller holds the lock. A single statement
        needs no BEGIN and COMMIT, each of which would wait for Python's interpreter lock."""
        if len(changes) == 1:
            self._look()
            try:
                self._file.execute(*changes[0])
                return
            except sqlite3.OperationalError as error:
                if not _is_busy(error):
                    raise
        with self._transaction():
            for text, values in changes:
                self._file.execute(text, values)

    def _note(self, problem: StorageProblem | None) -> None:
        """Record the current problem, or None."""
        self._problem, self._tried = problem, time.monotonic()
        self._log.note(None if problem is None else str(problem))

    def _problem_of(self, error: Exception) -> StorageProblem:
        """The StorageProblem for an error of SQLite or the system."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        full = code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC
        if isinstance(error, sqlite3.Error) and code not in UNHURT:
            self._broken = self._broken or code
        return StorageProblem(f"{self._what} {self._path} cannot be used: {error}", full)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class ReservedSpace:
    """A file that reserves disk space for changes of a database when the disk is full: ``nbytes``,
    but at first at most RESERVED_FRACTION of the free space."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._most = path, nbytes
        self._reserve(RESERVED_FRACTION)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the space for the block; afterwards the rest is reserved again."""
        with suppress(OSError):
            self._path.unlink()
        try:
            yield
        finally:
            self._reserve(1.0)

    @property
    def nbytes(self) -> int:
        """The bytes that are reserved now."""
        return self._path.stat().st_size if self._path.exists() else 0

    def _reserve(self, fraction: float) -> None:
        with suppress(OSError):
            if not self._path.exists():
                most = int(shutil.disk_usage(self._path.parent).free * fraction)
                # Bytes that no file system can store in less.
                data = os.urandom(min(self._most, most))
                with open(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600), "wb", 0) as file:
                    file.write(data)


class ProblemLog:
    """Logs a lasting problem once a minute, and its end. ``refused`` names what is refused
    meanwhile."""

    def __init__(self, refused: str = "new requests") -> None:
        self._refused = refused
        self._logged: float | None = None

    def note(self, problem: str | None) -> None:
        """Record the current problem, or None."""
        now = time.monotonic()
        if problem is None:
            if self._logged is not None:
                log.warning("storage can be written again")
            self._logged = None
        elif self._logged is None or now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.error("%s are refused: %s", self._refused, problem)
