"""One file of the disk cache: a header that describes the payload, and a checksum over both.

A file is used only if every check passes: kind and version, size, name, tokens, and the keyed
checksum. So files that were cut, changed, written by an older version or copied from another folder
are detected."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from contract.arrays import Bytes

MAGIC = b"zinc-rt kv cache"
VERSION = 1
CHECKSUM_BYTES = hashlib.sha256().digest_size
_FIELDS = struct.Struct("<16sIIQ32s64s")
"""MAGIC, VERSION, the number of the kind, bytes of the payload, name, tokens of the page."""
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


class EntryKind(Enum):
    """The contents of a file: keys and values of a page, or the recurrent state after its last
    token."""

    PAGE = ".page"
    STATE = ".state"

    @property
    def number(self) -> int:
        """The number in the header."""
        return list(EntryKind).index(self)


class Entry(NamedTuple):
    """The identity of a file: ``name`` and ``tokens`` of the page, and ``nbytes`` of payload.

    ``scope`` is the folder it lies in."""

    scope: str
    name: bytes
    tokens: bytes
    kind: EntryKind
    nbytes: int

    @property
    def path(self) -> str:
        """The path below the cache's folder."""
        return f"{self.scope}/{self.name.hex()}{self.kind.value}"


class BrokenEntry(Exception):
    """A file that must not be used. ``problem`` is "foreign" for a file of another cache, or
    "version", "cut" or "damaged"."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


def encode_entry(entry: Entry, payload: Bytes, secret: bytes) -> list[bytes | memoryview]:
    """The parts of the file, in order."""
    fields = _FIELDS.pack(MAGIC, VERSION, entry.kind.number, entry.nbytes, entry.name, entry.tokens)
    data = payload.data
    return [fields, _checksum(secret, fields, data), data]


def read_entry(folder: Path, entry: Entry, secret: bytes, memory: Bytes | None = None) -> Bytes:
    """The payload of a file, in ``memory`` if given. Raises FileNotFoundError if there is no file,
    OSError if it cannot be read, and BrokenEntry if it is not what ``entry`` says."""
    # A pipe or a device with this name must not block the reader.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(os.path.join(folder, entry.path), flags)
    with open(handle, "rb", buffering=0) as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BrokenEntry("foreign")
        header = file.read(HEADER_BYTES)
        _check_header(header, entry)
        if status.st_size != HEADER_BYTES + entry.nbytes:
            raise BrokenEntry("cut")
        payload = np.empty(entry.nbytes, np.uint8) if memory is None else memory
        view, filled = payload.data, 0
        while filled < entry.nbytes:
            count = file.readinto(view[filled:])
            if not count:
                raise BrokenEntry("cut")
            filled += count
    fields, checksum = header[: _FIELDS.size], header[_FIELDS.size :]
    if _checksum(secret, fields, payload.data) != checksum:
        raise BrokenEntry("damaged")
    return payload


def _check_header(header: bytes, entry: Entry) -> None:
    if not header.startswith(MAGIC):
        raise BrokenEntry("foreign" if len(header) >= len(MAGIC) else "cut")
    if len(header) < HEADER_BYTES:
        raise BrokenEntry("cut")
    _, version, kind, nbytes, name, tokens = _FIELDS.unpack_from(header)
    if version != VERSION:
        raise BrokenEntry("version")
    if (kind, nbytes, name) != (entry.kind.number, entry.nbytes, entry.name):
        raise BrokenEntry("foreign")
    if tokens != entry.tokens:
        raise BrokenEntry("damaged")


def _checksum(secret: bytes, fields: bytes, payload: memoryview) -> bytes:
    digest = hashlib.sha256(secret)
    digest.update(fields)
    digest.update(payload)
    return digest.digest()
