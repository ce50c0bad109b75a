"""The file of a trace: a checked header, then checked records one after the other.

    magic "ZRTTRACE", version, bytes and CRC-32 of the header, the header (JSON)
    for every record: kind, bytes, CRC-32 of these two, CRC-32 of the payload; the payload

All numbers are little-endian. A record is whole or it is not there: a recording that was killed
leaves a tail, which a reader drops. Bytes that changed are an error that names the place.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from contract.context_manager import ContextManager
from contract.errors import ConfigError, ZincError

MAGIC = b"ZRTTRACE"
TRACE_VERSION = 1
PREFIX = np.dtype([("magic", "V8"), ("version", "<u4"), ("nbytes", "<u4"), ("crc", "<u4")])
FRAME = np.dtype([("kind", "<u4"), ("nbytes", "<u4"), ("crc", "<u4"), ("payload_crc", "<u4")])
HEADER_BYTES_MAX = 1 << 20
RECORD_BYTES_MAX = 1 << 30
REMEDY = "record the run again"


class TraceError(ZincError):
    """A trace that cannot be read, or cannot be replayed here."""


class RecordKind(IntEnum):
    """What a record tells; ``harness.trace.records`` has the payloads."""

    GRAPH = 1
    RESERVE = 2
    BUFFER = 3
    FREE = 4
    BATCH = 5
    SUBMIT = 6
    RESULT = 7
    WRITE = 8
    READ = 9
    END = 10
    MODEL = 11
    FAILED = 12


KINDS = frozenset(RecordKind)


@dataclass(frozen=True, slots=True)
class Record:
    """One record; ``offset`` is where it begins in the file."""

    kind: RecordKind
    payload: memoryview
    offset: int


class TraceWriter:
    """Appends records to a new file. A context manager; ``close`` says that nothing is missing."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Creates the file. Raises ConfigError when it cannot be, or exists."""
        text = json.dumps(header, sort_keys=True).encode()
        prefix = np.zeros((), PREFIX)
        prefix["magic"] = np.void(MAGIC)
        prefix["version"], prefix["nbytes"] = TRACE_VERSION, len(text)
        prefix["crc"] = zlib.crc32(text)
        try:
            self._file: BinaryIO = path.open("xb")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        self._put(prefix.tobytes(), text)

    def write(self, kind: RecordKind, *parts: bytes | memoryview) -> None:
        """Append a record whose payload is ``parts``, joined."""
        frame = np.zeros((), FRAME)
        frame["kind"], frame["nbytes"] = kind, sum(map(len, parts))
        frame["crc"] = _frame_crc(frame.tobytes())
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        frame["payload_crc"] = crc
        self._put(frame.tobytes(), *parts)

    def flush(self) -> None:
        """Hand what was written to the system, so that it outlives this process."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def _put(self, *parts: bytes | memoryview) -> None:
        try:
            for part in parts:
                self._file.write(part)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> TraceError:
        return TraceError(
            f"{self._file.name}: cannot be written: {error.strerror}; make room for it"
        )

    def close(self) -> None:
        """Write the closing record and the rest. Harmless when closed."""
        if not self._file.closed:
            self.write(RecordKind.END)
            self._file.close()

    def abandon(self) -> None:
        """Close without saying that nothing is missing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class TraceReader(ContextManager):
    """A trace file, opened: its ``header``, and its records in order.

    ``whole`` becomes True when the closing record was reached. A context manager.
    """

    def __init__(self, path: Path) -> None:
        """Raises TraceError when it is no trace of a version this build reads."""
        self.path = path
        self.whole = False
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
        self._size = os.fstat(self._file.fileno()).st_size
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> dict[str, Any]:
        data = self._file.read(PREFIX.itemsize)
        if len(data) < PREFIX.itemsize or data[: len(MAGIC)] != MAGIC:
            raise TraceError(f"{self.path}: is not a trace; give a file that --trace wrote")
        prefix = np.frombuffer(data, PREFIX)[0]
        if prefix["version"] != TRACE_VERSION:
            raise TraceError(
                f"{self.path}: is a trace of version {prefix['version']}, this build reads "
                f"{TRACE_VERSION}; {REMEDY}"
            )
        text = self._file.read(min(int(prefix["nbytes"]), HEADER_BYTES_MAX))
        if len(text) != prefix["nbytes"] or zlib.crc32(text) != prefix["crc"]:
            raise TraceError(f"{self.path}: the header is damaged; {REMEDY}")
        header = json.loads(text)
        if not isinstance(header, dict):
            raise TraceError(f"{self.path}: the header is no JSON object; {REMEDY}")
        return header

    def records(self) -> Iterator[Record]:
        """Every whole record; a tail that was cut off ends them early.

        Raises TraceError, naming the offset, for bytes that changed since they were written.
        """
        offset = self._file.tell()
        while offset + FRAME.itemsize <= self._size and not self.whole:
            data = self._file.read(FRAME.itemsize)
            frame = np.frombuffer(data, FRAME)[0]
            kind, nbytes = int(frame["kind"]), int(frame["nbytes"])
            after = offset + FRAME.itemsize + nbytes
            if frame["crc"] != _frame_crc(data) or nbytes > RECORD_BYTES_MAX or kind not in KINDS:
                raise self._damaged(offset)
            if after > self._size:
                return
            payload = self._file.read(nbytes)
            if zlib.crc32(payload) != frame["payload_crc"]:
                raise self._damaged(offset)
            self.whole = kind == RecordKind.END
            yield Record(RecordKind(kind), memoryview(payload), offset)
            offset = after
        if self.whole and offset != self._size:
            raise TraceError(f"{self.path}: bytes follow the end at byte {offset}; {REMEDY}")

    def _damaged(self, offset: int) -> TraceError:
        return TraceError(f"{self.path}: the record at byte {offset} is damaged; {REMEDY}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _frame_crc(frame: bytes) -> int:
    """Of the kind and the length: a length that changed must not look like a tail cut off."""
    return zlib.crc32(frame[:8])
