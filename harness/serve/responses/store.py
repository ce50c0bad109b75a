"""Stored answers, in memory or in a folder. Each belongs to a tenant, and stays while there is
room.

Each answer names the answer it continues, which gives the whole conversation."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from contract.types import Tenant
from harness.serve.answers import Json
from harness.serve.responses.errors import not_found
from harness.serve.responses.wire import InputItem
from harness.serve.storage import BUSY_SECONDS, Database, ReservedSpace
from harness.serve.strict_json import known_type

MAX_STORED = 1000
"""Most answers of one tenant."""
MAX_BYTES = 64 << 20
"""Most bytes of them, as JSON."""
FILE = "responses.sqlite"
RESERVE_FILE = "responses.reserve"
RESERVED_BYTES = 4 << 20
"""Reserved for deleting on a full disk: the size to which SQLite lets its log grow."""
SCHEMA_VERSION = 1
TABLES = (
    "CREATE TABLE IF NOT EXISTS responses (tenant TEXT, id TEXT, used INTEGER, nbytes INTEGER,"
    " stored BLOB, PRIMARY KEY (tenant, id))",
    "CREATE INDEX IF NOT EXISTS by_use ON responses (used)",
    "CREATE TABLE IF NOT EXISTS known (file TEXT, tenant TEXT, PRIMARY KEY (file, tenant))",
)
NEXT_USE = "(SELECT COALESCE(MAX(used), 0) + 1 FROM responses)"
MAKE_ROOM = (
    "DELETE FROM responses WHERE tenant = ?1 AND id IN (SELECT id FROM (SELECT id,"
    " ROW_NUMBER() OVER latest AS number, SUM(nbytes) OVER latest AS total FROM responses"
    " WHERE tenant = ?1 WINDOW latest AS (ORDER BY used DESC)) WHERE number > ?2 OR total > ?3)"
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, the ``items`` of its request, and ``said``: its own items, with their token ids.
    ``previous`` is the id of the answer it continues."""

    response: Json
    items: tuple[InputItem, ...]
    said: tuple[InputItem, ...]
    previous: str | None


class _AnswerItems(msgspec.Struct):
    """The fields of a stored answer that a search for items reads."""

    items: list[InputItem]
    said: list[InputItem]


class ResponseStore(Database):
    """The stored answers of all tenants. Threads may share it, and with a ``folder`` processes
    too."""

    refused = "answers to be stored"

    def __init__(
        self,
        folder: Path | None = None,
        max_responses: int = MAX_STORED,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Raises ConfigError for an unusable folder."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        path = None if folder is None else folder / FILE
        super().__init__(path, SCHEMA_VERSION, "the stored responses", "--state", TABLES)
        self._reserved = (
            None if folder is None else ReservedSpace(folder / RESERVE_FILE, RESERVED_BYTES)
        )
        self._gone: set[str] = set()
        self._known: tuple[str, set[str]] | None = None

    def put(self, tenant: Tenant, stored: StoredResponse) -> None:
        """Store an answer, and delete the least recently used ones if there is no room. An answer
        larger than the whole room is not stored. Raises StorageProblem."""
        data = msgspec.json.encode(stored)
        if len(data) > self._max_bytes:
            return
        with self._used():
            try:
                with self._transaction():
                    self._write_pending()
                    self._file.execute(
                        f"INSERT OR REPLACE INTO responses VALUES (?, ?, {NEXT_USE}, ?, ?)",
                        (_key(tenant), stored.response["id"], len(data), data),
                    )
                    self._file.execute(
                        MAKE_ROOM, (_key(tenant), self._max_responses, self._max_bytes)
                    )
            except sqlite3.Error as error:
                self._note(self._problem_of(error))
                raise
            self._clear_pending()

    def get(self, tenant: Tenant, id: str) -> StoredResponse:
        """A stored answer of a tenant. Raises ApiError 404 and StorageProblem."""
        with self._used():
            stored = self._read(tenant, id)
            self._use(tenant, [id])
            return stored

    def delete(self, tenant: Tenant, id: str) -> None:
        """Delete an answer, also on a full disk. Raises ApiError 404 and StorageProblem."""

        def remove() -> None:
            key = _key(tenant), id
            gone = self._file.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", key)
            if not gone.rowcount:
                raise not_found(id)

        with self._used():
            self._delete(remove, BUSY_SECONDS)

    def conversation(self, tenant: Tenant, id: str | None) -> list[InputItem]:
        """All items up to and including an answer; none if ``id`` is None. Raises ApiError 404 if
        an answer of the conversation is no longer stored, and StorageProblem."""
        chain: dict[str, StoredResponse] = {}
        with self._used():
            while id is not None:
                if id in chain:
                    raise not_found(id, "previous_response_id")
                chain[id] = self._read(tenant, id, "previous_response_id")
                id = chain[id].previous
            self._use(tenant, [*reversed(chain)])
        return [item for one in reversed(chain.values()) for item in (*one.items, *one.said)]

    def items(self, tenant: Tenant, ids: Collection[str]) -> dict[str, InputItem]:
        """The stored items of a tenant with these ids, the latest of each. Reads stored answers
        until all are found. Raises StorageProblem."""
        found: dict[str, InputItem] = {}
        used: list[str] = []
        query = "SELECT id, stored FROM responses WHERE tenant = ? ORDER BY used DESC"
        with self._used():
            if _key(tenant) in self._gone:
                return found
            with closing(self._file.execute(query, (_key(tenant),))) as rows:
                while len(found) < len(ids) and (row := rows.fetchone()) is not None:
                    here = {item.id: item for item in _items_of(row[1])}
                    new = {id: here[id] for id in ids if id in here and id not in found}
                    found |= new
                    used += [row[0]] if new else []
            self._use(tenant, used[::-1])
        return found

    def forget_others(self, tenants: Collection[Tenant], file: Path | None = None) -> None:
        """Delete the answers of all tenants except these tenants of ``file``, and those that other
        servers recorded for other existing files. A file on disk is changed as soon as it can be
        written. Raises StorageProblem if it cannot be read."""
        keys, own = set(map(_key, tenants)), "" if file is None else str(file.resolve())
        with self._used():
            found = self._file.execute("SELECT DISTINCT tenant FROM responses").fetchall()
            known = self._file.execute("SELECT file, tenant FROM known").fetchall()
            kept = {key for name, key in known if name != own and (not name or Path(name).exists())}
            self._gone |= {key for (key,) in found} - keys - kept
            self._known = own, keys
            with suppress(sqlite3.Error):
                self._delete(self._write_pending, 0.0)
                self._clear_pending()

    def _delete(self, change: Callable[[], None], seconds: float) -> None:
        """Carry out a change that deletes, and empty the write-ahead log, which has the deleted
        content. On a full disk the reserved space is used, and deleted bytes are not overwritten.
        Waits for other processes as ``_whole`` does. Raises sqlite3.Error."""
        room: AbstractContextManager[None] = nullcontext()
        try:
            with self._transaction(seconds):
                change()
        except sqlite3.Error as error:
            if self._reserved is None or not self._problem_of(error).full:
                raise
            with self._reserved.released(), self._without_overwriting(), self._transaction(seconds):
                change()
            # If the space is not enough for all new pages of the log, writing some would waste it.
            if self._reserved.nbytes >= self._growth():
                room = self._reserved.released()
        with room, suppress(sqlite3.Error):
            self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _without_overwriting(self) -> Iterator[None]:
        """Do not overwrite deleted rows in the block: a full disk has no space to log zeros."""
        self._file.execute("PRAGMA secure_delete=OFF")
        try:
            yield
        finally:
            self._file.execute("PRAGMA secure_delete=ON")

    def _growth(self) -> int:
        """How many bytes the file is about to grow."""
        pages, size = (
            self._file.execute(f"PRAGMA page_{name}").fetchone()[0] for name in ("count", "size")
        )
        return int(pages * size) - (0 if self._path is None else self._path.stat().st_size)

    def _write_pending(self) -> None:
        """Delete the answers of removed tenants, and record the remaining tenants."""
        query = "DELETE FROM responses WHERE tenant = ?"
        self._file.executemany(query, [(key,) for key in self._gone])
        if self._known is not None:
            file, keys = self._known
            self._file.execute("DELETE FROM known WHERE file = ?", (file,))
            noted = "INSERT INTO known VALUES (?, ?)"
            self._file.executemany(noted, [(file, key) for key in keys])

    def _clear_pending(self) -> None:
        """Drop the pending changes, which the database has now."""
        self._gone.clear()
        self._known = None

    def _read(self, tenant: Tenant, id: str, param: str | None = None) -> StoredResponse:
        query = "SELECT stored FROM responses WHERE tenant = ? AND id = ?"
        row = self._file.execute(query, (_key(tenant), id)).fetchone()
        if row is None or _key(tenant) in self._gone:
            raise not_found(id, param)
        try:
            return msgspec.json.decode(row[0], type=known_type(StoredResponse))
        except (msgspec.DecodeError, TypeError):
            raise not_found(id, param) from None

    def _use(self, tenant: Tenant, ids: Sequence[str]) -> None:
        """Mark answers as used, the last one as most recent, if there is room to."""
        if not ids:
            return
        set_use = f"UPDATE responses SET used = {NEXT_USE} WHERE tenant = ? AND id = ?"
        with suppress(sqlite3.Error), self._transaction(0.0):
            self._file.executemany(set_use, [(_key(tenant), id) for id in ids])


def _items_of(stored: bytes) -> list[InputItem]:
    """The items of a stored answer and of its request; none if it is unreadable."""
    try:
        read = msgspec.json.decode(stored, type=known_type(_AnswerItems))
    except (msgspec.DecodeError, TypeError):
        return []
    return [*read.items, *read.said]


def _key(tenant: Tenant) -> str:
    """A tenant's id and name, since ids can be reused."""
    return f"{tenant.id} {tenant.name}"


def named(items: Sequence[InputItem]) -> tuple[InputItem, ...]:
    """Items, each with an id."""
    return tuple(
        item if item.id else msgspec.structs.replace(item, id=f"item_{secrets.token_hex(12)}")
        for item in items
    )
