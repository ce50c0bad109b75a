"""The file format of a trace: a checked header, then checked records.

    magic "ZRTTRACE", version, bytes and CRC-32 of the header, the header (JSON)
    for every record: kind, bytes, CRC-32 of these two, CRC-32 of the payload; the payload

All numbers are little-endian. A reader returns whole records only: a recording that was killed
leaves an incomplete record at the end, which the reader drops. Changed bytes are an error that
names their offset."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from contract.context_manager import ContextManager
from contract.errors import ZincError, system_errors_as
from contract.records import record

MAGIC = b"ZRTTRACE"
TRACE_VERSION = 2
PREFIX = record("V8 magic, u4 version nbytes crc")
FRAME = record("u4 kind nbytes crc payload_crc")
HEADER_BYTES_MAX = 1 << 20
RECORD_BYTES_MAX = 1 << 30
REMEDY = "record the run again"


class TraceError(ZincError):
    """A trace that cannot be read, or cannot be replayed here."""


class RecordKind(IntEnum):
    """The kind of a record; ``harness.trace.records`` defines the payloads."""

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
    """One record; ``offset`` is its byte offset in the file."""

    kind: RecordKind
    payload: memoryview
    offset: int

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return int(FRAME.itemsize) + len(self.payload)


class TraceWriter:
    """Appends records to a new file. A context manager; ``close`` marks the trace as complete.

    A ``patient`` writer keeps records in memory while they cannot be written; ``problem`` says why.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, patient: bool = False) -> None:
        """Create the file. Raises ConfigError when that fails or the file exists."""
        text = json.dumps(header, sort_keys=True).encode()
        prefix = np.zeros((), PREFIX)
        prefix["magic"] = np.void(MAGIC)
        prefix["version"], prefix["nbytes"] = TRACE_VERSION, len(text)
        prefix["crc"] = zlib.crc32(text)
        with system_errors_as(f"{path}: cannot be written"):
            self._file: BinaryIO | PatientFile = PatientFile(path) if patient else path.open("xb")
        self._put(prefix.tobytes(), text)

    @property
    def problem(self) -> str | None:
        """Reason why records wait in memory, None when they do not."""
        return self._file.problem if isinstance(self._file, PatientFile) else None

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
        """Pass buffered bytes to the operating system, so that they survive this process."""
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
        """Write the closing record and close the file. Harmless when closed."""
        if not self._file.closed:
            self.write(RecordKind.END)
            try:
                self._file.close()
            except OSError as error:
                raise self._unwritable(error) from None

    def abandon(self) -> None:
        """Close the file without marking it as complete; what ends the trace is another error."""
        with suppress(OSError):
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
    """An open trace file: its ``header``, and its records in order. A context manager.

    ``nbytes`` is the size of the file. ``whole`` becomes True when the closing record was read."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError when the file is not a trace of a version this build reads."""
        self.path = path
        self.whole = False
        with system_errors_as(f"{path}: cannot be read", TraceError):
            self._file: BinaryIO = path.open("rb")
        self.nbytes = os.fstat(self._file.fileno()).st_size
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
        """Yield every whole record; an incomplete last record ends them. Raises TraceError, naming
        the offset, for bytes that changed since they were written."""
        offset = self._file.tell()
        while offset + FRAME.itemsize <= self.nbytes and not self.whole:
            data = self._file.read(FRAME.itemsize)
            frame = np.frombuffer(data, FRAME)[0]
            kind, nbytes = int(frame["kind"]), int(frame["nbytes"])
            after = offset + FRAME.itemsize + nbytes
            if frame["crc"] != _frame_crc(data) or nbytes > RECORD_BYTES_MAX or kind not in KINDS:
                raise self._damaged(offset)
            if after > self.nbytes:
                return
            payload = self._file.read(nbytes)
            if zlib.crc32(payload) != frame["payload_crc"]:
                raise self._damaged(offset)
            self.whole = kind == RecordKind.END
            yield Record(RecordKind(kind), memoryview(payload), offset)
            offset = after
        if self.whole and offset != self.nbytes:
            raise TraceError(f"{self.path}: bytes follow the end at byte {offset}; {REMEDY}")

    def _damaged(self, offset: int) -> TraceError:
        return TraceError(f"{self.path}: the record at byte {offset} is damaged; {REMEDY}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _frame_crc(frame: bytes) -> int:
    """The CRC-32 of kind and length, so that a changed length does not look like an incomplete
    record."""
    return zlib.crc32(frame[:8])


BUFFER_BYTES = 1 << 16
MAX_WAITING_BYTES = 256 << 20
"""Most bytes that may wait in memory; with more, a failed write is an error."""


class PatientFile:
    """Appends to a new file, and keeps bytes in memory while the disk is full. ``problem`` says why
    bytes wait in memory, None when none do."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError when that fails or the file exists."""
        self._raw = path.open("xb", buffering=0)
        self._waiting = bytearray()
        self.name = str(path)
        self.problem: str | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._raw.closed

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises OSError when too many wait in memory."""
        self._waiting += data
        limit = BUFFER_BYTES if self.problem is None else MAX_WAITING_BYTES
        if len(self._waiting) > limit:
            self.flush()

    def flush(self) -> None:
        """Write the waiting bytes, as many as the disk takes. Raises OSError when too many wait."""
        while self._waiting:
            try:
                written = self._raw.write(self._waiting)
            except OSError as error:
                self.problem = error.strerror or str(error)
                if len(self._waiting) > MAX_WAITING_BYTES:
                    raise
                return
            del self._waiting[:written]
        self.problem = None

    def close(self) -> None:
        """Close the file. Bytes the disk has no room for are lost."""
        if not self._raw.closed:
            self.flush()
            self._raw.close()
