"""The ledger, an SQLite file that outlives the server: counters of tenants by day, and which model
is active.

A request is counted in a transaction before its answer ends. So a killed process loses no request
whose end a client saw. The write-ahead log is not synced for every request: a power failure may
lose the last seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import add, attrgetter
from pathlib import Path

from harness.serve.storage import Database

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of requests; ``cached_tokens`` are among the ``prompt_tokens``."""

    requests: int = 0
    completed: int = 0
    failed: int = 0
    abandoned: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0


NAMES = tuple(field.name for field in fields(Counts))
MAX_DAYS = 31
"""Most days whose counts are returned."""
values_of = attrgetter(*NAMES)


class LedgerStore(Database):
    """The ledger's file. Threads and processes may share it."""

    def __init__(self, path: Path) -> None:
        """Opens or creates ``path``. Raises ConfigError if it cannot be used."""
        columns = ", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in NAMES)
        tables = (
            "CREATE TABLE IF NOT EXISTS usage"
            f" (tenant INTEGER, day TEXT, {columns}, PRIMARY KEY (tenant, day)) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS activated (began_with TEXT PRIMARY KEY, name TEXT)",
        )
        super().__init__(path, SCHEMA_VERSION, "the ledger", "--ledger", tables)
        self._counting = threading.Lock()
        self._waiting: dict[tuple[int, str], Counts] = {}
        self._counted = self._attempted = 0
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in NAMES)
        parameters = ", ".join("?" for _ in range(len(NAMES) + 2))
        self._add = (
            f"INSERT INTO usage (tenant, day, {', '.join(NAMES)}) VALUES ({parameters})"
            f" ON CONFLICT (tenant, day) DO UPDATE SET {sums}"
        )

    def add(self, tenant: int, counts: Counts) -> None:
        """Add counts for today (UTC). After this call a killed process does not lose them. Requests
        that end together share a transaction. While the file cannot be written, counts stay in
        memory."""
        key = tenant, time.strftime("%Y-%m-%d", time.gmtime())
        with self._counting:
            self._wait(key, counts)
            self._counted += 1
            number = self._counted
        with self._lock:
            if self._attempted < number:
                self._try()

    def _wait(self, key: tuple[int, str], counts: Counts) -> None:
        """Add to the counts in memory. The caller holds ``_counting``."""
        before = self._waiting.get(key, Counts())
        self._waiting[key] = Counts(*map(add, values_of(before), values_of(counts)))

    def _write(self) -> None:
        """Write the counts in memory; without any, rewrite the version, to test that the file can
        be written."""
        with self._counting:
            waiting, self._waiting = self._waiting, {}
            self._attempted = self._counted
        try:
            if waiting:
                rows = [(*key, *values_of(counts)) for key, counts in waiting.items()]
                self._apply([(self._add, row) for row in rows])
            else:
                super()._write()
        except BaseException:
            with self._counting:
                for key, counts in waiting.items():
                    self._wait(key, counts)
            raise

    def total(self, tenant: int) -> Counts:
        """All counts of a tenant. Raises StorageProblem, as do the other methods that read."""
        sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in NAMES)
        with self._used():
            row = self._file.execute(f"SELECT {sums} FROM usage WHERE tenant = ?", (tenant,))
            return Counts(*row.fetchone())

    def tenants(self) -> frozenset[int]:
        """The ids of all tenants with counts."""
        with self._used():
            return frozenset(id for (id,) in self._file.execute("SELECT tenant FROM usage"))

    def days(self, tenant: int) -> Mapping[str, Counts]:
        """The counts of a tenant's latest MAX_DAYS days, newest first."""
        asked = f"SELECT day, {', '.join(NAMES)} FROM usage WHERE tenant = ?"
        with self._used():
            rows = self._file.execute(f"{asked} ORDER BY day DESC LIMIT ?", (tenant, MAX_DAYS))
            return {day: Counts(*values) for day, *values in rows.fetchall()}

    def activate(self, began_with: Path, name: str | None) -> None:
        """Record that ``name`` was activated in servers started with the file ``began_with``; None
        for the model of that file. Raises StorageProblem."""
        row = (str(began_with.resolve()), name)
        with self._used(), self._transaction():
            self._file.execute("INSERT OR REPLACE INTO activated VALUES (?, ?)", row)

    def activated(self, began_with: Path) -> str | None:
        """The name of the model activated last in servers started with this file; None for the
        file's own."""
        asked = "SELECT name FROM activated WHERE began_with = ?"
        with self._used():
            row = self._file.execute(asked, (str(began_with.resolve()),)).fetchone()
            return None if row is None else row[0]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._waiting:
                self._try()
        super().close()
