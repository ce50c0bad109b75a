"""The ledger, an SQLite file that outlives the server: counters of tenants by day, and which model
is active.

A request is counted in a transaction before its answer ends. So a killed process loses no request
whose end a client saw. The write-ahead log is not synced for every request: a power failure may
lose the last seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from operator import add
from pathlib import Path
from typing import NamedTuple

from contract.types import Tenant
from harness.console import text_of_name
from harness.serve.storage import Database

SCHEMA_VERSION = 1


class Counts(NamedTuple):
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


NAMES = Counts._fields
MAX_DAYS = 31
"""Most days whose counts are returned."""
SUMS = ", ".join(f"COALESCE(SUM({name}), 0)" for name in NAMES)
OF_TENANT = (
    f"(SELECT tenant, '' AS name, day, {', '.join(NAMES)} FROM usage"
    f" UNION ALL SELECT tenant, name, day, {', '.join(NAMES)} FROM named_usage)"
    " WHERE tenant = ? AND name IN ('', ?)"
)


class LedgerStore(Database):
    """The ledger's file. Threads and processes may share it."""

    def __init__(self, path: Path | None) -> None:
        """Opens or creates ``path``; None is memory. Raises ConfigError if it cannot be used."""
        columns = ", ".join(f"{name} INTEGER NOT NULL DEFAULT 0" for name in NAMES)
        # ``usage`` is of older servers, which knew tenants by id alone.
        tables = (
            "CREATE TABLE IF NOT EXISTS named_usage"
            f" (tenant INTEGER, name TEXT, day TEXT, {columns}, PRIMARY KEY (tenant, name, day))"
            " WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS usage"
            f" (tenant INTEGER, day TEXT, {columns}, PRIMARY KEY (tenant, day)) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS activated (began_with TEXT PRIMARY KEY, name TEXT)",
        )
        super().__init__(path, SCHEMA_VERSION, "the ledger", "--ledger", tables)
        self._counting = threading.Lock()
        self._waiting: dict[tuple[int, str, str], Counts] = {}
        self._counted = self._attempted = 0
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in NAMES)
        parameters = ", ".join("?" for _ in range(len(NAMES) + 3))
        self._add = (
            f"INSERT INTO named_usage (tenant, name, day, {', '.join(NAMES)}) VALUES ({parameters})"
            f" ON CONFLICT (tenant, name, day) DO UPDATE SET {sums}"
        )

    def add(self, tenant: Tenant, counts: Counts) -> None:
        """Add counts of a tenant, known by id and name, for today (UTC). After this call a killed
        process does not lose them. Requests that end together share a transaction. While the file
        cannot be written, counts stay in memory."""
        key = tenant.id, tenant.name, time.strftime("%Y-%m-%d", time.gmtime())
        with self._counting:
            self._wait(key, counts)
            self._counted += 1
            number = self._counted
        with self._lock:
            if self._attempted < number:
                self._try()

    def _wait(self, key: tuple[int, str, str], counts: Counts) -> None:
        """Add to the counts in memory. The caller holds ``_counting``."""
        before = self._waiting.get(key)
        self._waiting[key] = counts if before is None else Counts(*map(add, before, counts))

    def _write(self) -> None:
        """Write the counts in memory; without any, rewrite the version, to test that the file can
        be written."""
        with self._counting:
            waiting, self._waiting = self._waiting, {}
            self._attempted = self._counted
        try:
            if waiting:
                rows = [(*key, *counts) for key, counts in waiting.items()]
                self._apply([(self._add, row) for row in rows])
            else:
                super()._write()
        except BaseException:
            with self._counting:
                for key, counts in waiting.items():
                    self._wait(key, counts)
            raise

    def total(self, tenant: Tenant) -> Counts:
        """All counts of a tenant. Raises StorageProblem, as do the other methods that read."""
        with self._used():
            row = self._file.execute(f"SELECT {SUMS} FROM {OF_TENANT}", (tenant.id, tenant.name))
            return Counts(*row.fetchone())

    def tenants(self) -> frozenset[int]:
        """The ids of all tenants with counts."""
        with self._used():
            query = "SELECT tenant FROM usage UNION SELECT tenant FROM named_usage"
            return frozenset(id for (id,) in self._file.execute(query))

    def days(self, tenant: Tenant) -> Mapping[str, Counts]:
        """The counts of a tenant's latest MAX_DAYS days, newest first."""
        query = f"SELECT day, {SUMS} FROM {OF_TENANT} GROUP BY day ORDER BY day DESC LIMIT ?"
        with self._used():
            rows = self._file.execute(query, (tenant.id, tenant.name, MAX_DAYS))
            return {day: Counts(*values) for day, *values in rows.fetchall()}

    def activate(self, began_with: Path, name: str | None) -> None:
        """Record that ``name`` was activated in servers started with the file ``began_with``; None
        for the model of that file. Raises StorageProblem."""
        row = (text_of_name(str(began_with.resolve())), name)
        with self._used(), self._transaction():
            self._file.execute("INSERT OR REPLACE INTO activated VALUES (?, ?)", row)

    def activated(self, began_with: Path) -> str | None:
        """The name of the model activated last in servers started with this file; None for the
        file's own."""
        query = "SELECT name FROM activated WHERE began_with = ?"
        with self._used():
            path = text_of_name(str(began_with.resolve()))
            row = self._file.execute(query, (path,)).fetchone()
            return None if row is None else row[0]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._waiting:
                self._try()
        super().close()
