"""The receipts of a server in SQLite. Each tenant has a chain, in which a receipt names the one
before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from contract.types import Tenant
from harness.serve.receipts.canonical import canonical_digest
from harness.serve.receipts.document import VERSION, signed_document
from harness.serve.receipts.keys import PRIVATE, open_key
from harness.serve.storage import Database

FILE = "receipts.sqlite"
SCHEMA = 1
NAME = "json_extract(document, '$.payload.tenant.name')"
"""The name of the tenant of a receipt: another one may have the id later."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS receipts (tenant INTEGER, number INTEGER, id TEXT,"
    " digest TEXT, document TEXT, PRIMARY KEY (tenant, number))",
    "CREATE INDEX IF NOT EXISTS by_id ON receipts (tenant, id)",
    f"CREATE INDEX IF NOT EXISTS by_name ON receipts (tenant, {NAME}, number)",
)
OWN = f"tenant = ? AND {NAME} = ?"
LATEST = "latest"
"""Means a tenant's newest receipt instead of an id."""
ROOM_FACTOR = 4
"""Free bytes needed for each byte of a receipt: it is written to the journal and the file."""
Json = dict[str, Any]


class ReceiptStore(Database):
    """A folder with the receipts and their signing key. Threads and processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Opens or creates ``folder``. Raises ConfigError if it cannot be used."""
        self.folder = folder
        self._key = open_key(folder)
        super().__init__(folder / FILE, SCHEMA, "the receipts", "--receipts", TABLES)
        self._key_state: tuple[int, int] | None = None
        self._needed_bytes = 0

    def add(self, tenant: int, payload: Json, leaves: list[list[str]]) -> Json:
        """Give ``payload`` the next number in the tenant's chain, sign and store it, and return the
        receipt. Raises StorageProblem."""
        with self._lock:
            try:
                with self._transaction():
                    number, previous = self._last(tenant)
                    self._look_for_key()
                    numbered = payload | {"number": number + 1, "previous": previous}
                    document = signed_document(numbered, leaves, self._key)
                    digest = canonical_digest(numbered)
                    text = json.dumps(document)
                    self._needed_bytes = max(self._needed_bytes, ROOM_FACTOR * len(text))
                    row = (tenant, number + 1, payload["id"], digest, text)
                    self._file.execute("INSERT INTO receipts VALUES (?, ?, ?, ?, ?)", row)
            except (sqlite3.Error, OSError) as error:
                self._note(self._problem_of(error))
                raise self._problem_of(error) from None
            self._note(None)
        return document

    def _write(self) -> None:
        """Test that a receipt can be stored: the key is readable, and there is room for the largest
        receipt that did not fit."""
        super()._write()
        self._look_for_key()
        needed = self._needed_bytes if self._problem is not None else 0
        if shutil.disk_usage(self.folder).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def find(self, tenant: Tenant, name: str) -> Json | None:
        """The tenant's latest receipt with this id, or its latest one for LATEST; None if there is
        none. Raises StorageProblem, as do the other methods that read."""
        named = "" if name == LATEST else " AND id = ?"
        query = f"SELECT document FROM receipts WHERE {OWN}{named} ORDER BY number DESC"
        values = (tenant.id, tenant.name, name)[: 3 if named else 2]
        with self._used():
            row = self._file.execute(f"{query} LIMIT 1", values).fetchone()
        return None if row is None else json.loads(row[0])

    def listed(self, tenant: Tenant, after: int, limit: int) -> list[Json]:
        """Numbers, ids and digests of a tenant's receipts after number ``after``."""
        query = f"SELECT number, id, digest FROM receipts WHERE {OWN} AND number > ?"
        values = tenant.id, tenant.name, after, limit
        with self._used():
            rows = self._file.execute(f"{query} ORDER BY number LIMIT ?", values)
            return [dict(zip(("number", "id", "sha256"), row, strict=True)) for row in rows]

    def exported(self, tenant: int) -> Iterator[str]:
        """The receipts of a tenant as JSON texts, in the order of the chain."""
        query = "SELECT document FROM receipts WHERE tenant = ? AND number > ? ORDER BY number"
        number = 0
        while True:
            with self._used():
                row = self._file.execute(f"{query} LIMIT 1", (tenant, number)).fetchone()
            if row is None:
                return
            number += 1
            yield row[0]

    def tenants(self) -> dict[int, int]:
        """Number of receipts of each tenant."""
        with self._used():
            rows = self._file.execute("SELECT tenant, COUNT(*) FROM receipts GROUP BY tenant")
            return dict(rows.fetchall())

    def _look_for_key(self) -> None:
        """Read the key again if it was rotated. Raises OSError."""
        state = _state(self.folder)
        if state != self._key_state:
            try:
                self._key, self._key_state = open_key(self.folder), state
            except ConfigError as error:
                raise OSError(str(error)) from None

    def _last(self, tenant: int) -> tuple[int, str | None]:
        query = "SELECT number, digest FROM receipts WHERE tenant = ? ORDER BY number DESC LIMIT 1"
        row = self._file.execute(query, (tenant,)).fetchone()
        return (0, None) if row is None else row


def _state(folder: Path) -> tuple[int, int]:
    """The size and time of the private key's file, which change with a rotation."""
    state = (folder / PRIVATE).stat()
    return state.st_ino, state.st_mtime_ns


def base_payload(name: str, kind: str) -> Json:
    """The first fields of every receipt."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"receipt": VERSION, "id": name, "kind": kind, "time": now}
