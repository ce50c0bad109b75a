"""Answers that are stored, in memory: for the tenant who asked, as long as there is room.

What a conversation was is found by going from each answer to the one it continued.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from harness.serve.answers import Json
from harness.serve.responses.errors import not_found
from harness.serve.responses.wire import InputItem

MOST_STORED = 1000
"""Most answers of one tenant."""
MOST_BYTES = 64 << 20
"""Most bytes of them, as JSON."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, the ``items`` it was asked with, and those that it consists of as ``said``: with
    the tokens they were made of. It continued the answer ``previous``."""

    response: Json
    items: tuple[InputItem, ...]
    said: tuple[InputItem, ...]
    previous: str | None

    @property
    def id(self) -> str:
        """Its name."""
        id: str = self.response["id"]
        return id

    @property
    def nbytes(self) -> int:
        """Its size as JSON."""
        return len(msgspec.json.encode((self.response, self.items, self.said)))


@dataclass(slots=True)
class _Shelf:
    """The stored answers of one tenant, least recently used first, with their sizes in bytes."""

    responses: OrderedDict[str, tuple[StoredResponse, int]] = field(default_factory=OrderedDict)
    nbytes: int = 0


class ResponseStore:
    """The stored answers of all tenants. Threads may share it."""

    def __init__(self, most: int = MOST_STORED, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._shelves: dict[int, _Shelf] = {}

    def put(self, tenant: int, stored: StoredResponse) -> None:
        """Store an answer; those least recently used make room. One that is larger than all the
        room there is, is not stored."""
        size = stored.nbytes
        if size > self._most_bytes:
            return
        with self._lock:
            shelf = self._shelves.setdefault(tenant, _Shelf())
            shelf.responses[stored.id] = stored, size
            shelf.nbytes += size
            while len(shelf.responses) > self._most or shelf.nbytes > self._most_bytes:
                _, (_, freed) = shelf.responses.popitem(last=False)
                shelf.nbytes -= freed

    def get(self, tenant: int, id: str) -> StoredResponse:
        """A stored answer of a tenant. Raises ApiError 404."""
        with self._lock:
            shelf = self._shelves.get(tenant, _Shelf())
            if id not in shelf.responses:
                raise not_found(id)
            shelf.responses.move_to_end(id)
            return shelf.responses[id][0]

    def delete(self, tenant: int, id: str) -> None:
        """Forget an answer. Raises ApiError 404."""
        with self._lock:
            shelf = self._shelves.get(tenant, _Shelf())
            if id not in shelf.responses:
                raise not_found(id)
            _, freed = shelf.responses.pop(id)
            shelf.nbytes -= freed

    def conversation(self, tenant: int, id: str | None) -> list[InputItem]:
        """All items up to and with an answer, none for no answer. Raises ApiError 404 where one of
        the answers it continues is not stored any more."""
        with self._lock:
            shelf = self._shelves.get(tenant, _Shelf())
            chain: list[StoredResponse] = []
            while id is not None:
                if id not in shelf.responses:
                    raise not_found(id, "previous_response_id")
                chain.append(shelf.responses[id][0])
                id = chain[-1].previous
            for stored in reversed(chain):
                shelf.responses.move_to_end(stored.id)
            return [item for stored in reversed(chain) for item in (*stored.items, *stored.said)]

    def forget_others(self, tenants: Collection[int]) -> None:
        """Forget what is stored for all but these tenants."""
        with self._lock:
            for tenant in [one for one in self._shelves if one not in tenants]:
                del self._shelves[tenant]


def named(items: Sequence[InputItem]) -> tuple[InputItem, ...]:
    """Items that have an id each."""
    return tuple(
        item if item.id else msgspec.structs.replace(item, id=f"item_{secrets.token_hex(12)}")
        for item in items
    )
