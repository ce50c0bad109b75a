"""Answers that are stored, in memory or in a folder: for the tenant who asked, as long as there is
room.

What a conversation was is found by going from each answer to the one it continued.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from contract.types import Tenant
from harness.serve import storage
from harness.serve.answers import Json
from harness.serve.responses.errors import not_found
from harness.serve.responses.wire import InputItem
from harness.serve.storage import Database, StorageProblem

MOST_STORED = 1000
"""Most answers of one tenant."""
MOST_BYTES = 64 << 20
"""Most bytes of them, as JSON."""
FILE = "responses.sqlite"
SCHEMA_VERSION = 1
TABLES = (
    "CREATE TABLE IF NOT EXISTS responses (tenant TEXT, id TEXT, used INTEGER, nbytes INTEGER,"
    " stored BLOB, PRIMARY KEY (tenant, id))",
    "CREATE INDEX IF NOT EXISTS by_use ON responses (used)",
)
NEXT_USE = "(SELECT COALESCE(MAX(used), 0) + 1 FROM responses)"
MAKE_ROOM = (
    "DELETE FROM responses WHERE tenant = ?1 AND id IN (SELECT id FROM (SELECT id,"
    " ROW_NUMBER() OVER latest AS number, SUM(nbytes) OVER latest AS total FROM responses"
    " WHERE tenant = ?1 WINDOW latest AS (ORDER BY used DESC)) WHERE number > ?2 OR total > ?3)"
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, the ``items`` it was asked with, and those that it consists of as ``said``: with
    the tokens they were made of. It continued the answer ``previous``."""

    response: Json
    items: tuple[InputItem, ...]
    said: tuple[InputItem, ...]
    previous: str | None


class ResponseStore(Database):
    """The stored answers of all tenants. Threads may share it, and processes a ``folder``."""

    def __init__(
        self, folder: Path | None = None, most: int = MOST_STORED, most_bytes: int = MOST_BYTES
    ) -> None:
        """Raises ConfigError for a folder that cannot have them."""
        self._most = most
        self._most_bytes = most_bytes
        path = None if folder is None else folder / FILE
        super().__init__(path, SCHEMA_VERSION, "the stored responses", "--state", TABLES)
        self._problem: StorageProblem | None = None
        self._tried = 0.0
        self._gone: set[str] = set()

    def put(self, tenant: Tenant, stored: StoredResponse) -> None:
        """Store an answer; those least recently used make room. One that is larger than all the
        room there is, is not stored. Raises StorageProblem."""
        data = msgspec.json.encode(stored)
        if len(data) > self._most_bytes:
            return
        with self._lock:
            try:
                with self._whole():
                    self._forget()
                    self._file.execute(
                        f"INSERT OR REPLACE INTO responses VALUES (?, ?, {NEXT_USE}, ?, ?)",
                        (_key(tenant), stored.response["id"], len(data), data),
                    )
                    self._file.execute(MAKE_ROOM, (_key(tenant), self._most, self._most_bytes))
                self._gone.clear()
            except sqlite3.DatabaseError as error:
                self._tried = time.monotonic()
                self._problem = self._problem_of(error)
                raise self._problem from None

    def check(self) -> None:
        """Raises StorageProblem while nothing can be written; that is tried again after
        RETRY_SECONDS."""
        with self._lock:
            late = time.monotonic() - self._tried >= storage.RETRY_SECONDS
            if self._problem is not None and late:
                self._tried = time.monotonic()
                with suppress(sqlite3.DatabaseError):
                    self._file.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                    self._problem = None
            if self._problem is not None:
                raise self._problem

    def get(self, tenant: Tenant, id: str) -> StoredResponse:
        """A stored answer of a tenant. Raises ApiError 404, and StorageProblem."""
        with self._lock:
            stored = self._read(tenant, id)
            self._use(tenant, [id])
            return stored

    def delete(self, tenant: Tenant, id: str) -> None:
        """Forget an answer. Raises ApiError 404, and StorageProblem."""
        with self._lock:
            key = _key(tenant), id
            try:
                gone = self._file.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", key)
            except sqlite3.DatabaseError as error:
                raise self._problem_of(error) from None
            if not gone.rowcount:
                raise not_found(id)

    def conversation(self, tenant: Tenant, id: str | None) -> list[InputItem]:
        """All items up to and with an answer, none for no answer. Raises ApiError 404 where one of
        the answers it continues is not stored any more, and StorageProblem."""
        chain: dict[str, StoredResponse] = {}
        with self._lock:
            while id is not None:
                if id in chain:
                    raise not_found(id, "previous_response_id")
                chain[id] = self._read(tenant, id, "previous_response_id")
                id = chain[id].previous
            self._use(tenant, [*reversed(chain)])
        return [item for one in reversed(chain.values()) for item in (*one.items, *one.said)]

    def forget_others(self, tenants: Collection[Tenant]) -> None:
        """Forget what is stored for all but these tenants: on disk as soon as it can be written.
        Raises StorageProblem where it cannot be read."""
        keys = set(map(_key, tenants))
        with self._lock:
            try:
                found = self._file.execute("SELECT DISTINCT tenant FROM responses").fetchall()
            except sqlite3.DatabaseError as error:
                raise self._problem_of(error) from None
            self._gone |= {key for (key,) in found} - keys
            with suppress(sqlite3.DatabaseError):
                with self._whole():
                    self._forget()
                self._gone.clear()

    def _forget(self) -> None:
        """Delete what is stored for tenants that are gone."""
        asked = "DELETE FROM responses WHERE tenant = ?"
        self._file.executemany(asked, [(key,) for key in self._gone])

    def _read(self, tenant: Tenant, id: str, param: str | None = None) -> StoredResponse:
        asked = "SELECT stored FROM responses WHERE tenant = ? AND id = ?"
        try:
            row = self._file.execute(asked, (_key(tenant), id)).fetchone()
        except sqlite3.DatabaseError as error:
            raise self._problem_of(error) from None
        if row is None or _key(tenant) in self._gone:
            raise not_found(id, param)
        try:
            return msgspec.json.decode(row[0], type=StoredResponse)
        except (msgspec.DecodeError, TypeError):
            raise not_found(id, param) from None

    def _use(self, tenant: Tenant, ids: Sequence[str]) -> None:
        """Note that answers were used, the last of them last, where there is room to."""
        if not ids:
            return
        set_use = f"UPDATE responses SET used = {NEXT_USE} WHERE tenant = ? AND id = ?"
        with suppress(sqlite3.DatabaseError), self._whole():
            self._file.executemany(set_use, [(_key(tenant), id) for id in ids])


def _key(tenant: Tenant) -> str:
    """A tenant with its name, since another one may have the id later."""
    return f"{tenant.id} {tenant.name}"


def named(items: Sequence[InputItem]) -> tuple[InputItem, ...]:
    """Items that have an id each."""
    return tuple(
        item if item.id else msgspec.structs.replace(item, id=f"item_{secrets.token_hex(12)}")
        for item in items
    )
