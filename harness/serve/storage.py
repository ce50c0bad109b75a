"""Files that a server has to write before it may answer: what happens while it cannot."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from contract.context_manager import ContextManager
from contract.errors import ConfigError, ZincError, system_words

BUSY_SECONDS = 10.0
"""Seconds that a change waits for another process."""
RETRY_SECONDS = 1.0
"""Seconds after a failure until it is tried again."""
LOG_SECONDS = 60.0
log = logging.getLogger("zinc_rt.serve")


class StorageProblem(ZincError):
    """A file cannot be written now; ``full`` says that its disk has no room."""

    def __init__(self, problem: str, full: bool) -> None:
        self.full = full
        super().__init__(problem)


class Database(ContextManager):
    """A file of SQLite that threads and processes may share, with these ``tables``; in memory where
    there is no ``path``. Its owner alone may read a new one."""

    def __init__(
        self, path: Path | None, version: int, what: str, option: str, tables: Iterable[str]
    ) -> None:
        """Raises ConfigError, naming the ``option`` that says where it is."""
        self._lock = threading.Lock()
        self._path, self._what = path, what
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            name = path or ":memory:"
            self._file = sqlite3.connect(
                name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            found = self._file.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, version):
                raise ConfigError(f"{path}: has version {found} of {what}, not {version}")
            for table in tables:
                self._file.execute(table)
            self._file.execute(f"PRAGMA user_version={version}")
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"{path}: cannot be {what}: {system_words(error)}; name another with {option}"
            ) from None

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All changes of the block or none."""
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    def _problem_of(self, error: Exception) -> StorageProblem:
        """The problem that a failed change is."""
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        full = full or getattr(error, "errno", None) == errno.ENOSPC
        return StorageProblem(f"{self._what} {self._path} cannot be used: {error}", full)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class ProblemLog:
    """One line a minute of a problem that goes on, and one at its end."""

    def __init__(self) -> None:
        self._logged: float | None = None

    def note(self, problem: str | None) -> None:
        """There is this problem now, or none."""
        now = time.monotonic()
        if problem is None:
            if self._logged is not None:
                log.warning("storage can be written again")
            self._logged = None
        elif self._logged is None or now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.error("new requests are refused: %s", problem)
