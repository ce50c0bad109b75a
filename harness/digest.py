"""Digests of files, and of logits as they are compared and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from contract.arrays import Floats
from reference.thread_pool import thread_pool

CHUNK_ELEMENTS = 1 << 20
"""Elements copied at a time: a long context's logits are large."""


def logits_digest(logits: Floats) -> str:
    """SHA-256, hex, over the values as little-endian binary32 with -0 written as +0 (rule R0).

    Any shape, in row-major order. Raises ValueError for NaN, infinity (they are errors of a
    sequence, not results) and for other dtypes."""
    if logits.dtype != np.float32:
        raise ValueError(f"logits are {logits.dtype}, a digest is over float32")
    if not np.isfinite(logits).all():
        raise ValueError("logits hold a NaN or an infinity")
    digest = hashlib.sha256()
    flat = logits.reshape(-1)
    for start in range(0, flat.size, CHUNK_ELEMENTS):
        part = flat[start : start + CHUNK_ELEMENTS] + np.float32(0.0)
        digest.update(np.ascontiguousarray(part, "<f4").data)
    return digest.hexdigest()


class RunningDigest:
    """The ``logits_digest`` of all rows so far, after each row. Call the object with further
    rows."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._after: list[str] = []

    def __call__(self, first: int, rows: Floats) -> None:
        """Add rows, float32[rows, vocab]."""
        for row in rows:
            self._hash.update(np.ascontiguousarray(row + np.float32(0.0), "<f4").data)
            self._after.append(self._hash.hexdigest())

    def note(self, rows: int, digests: Sequence[str]) -> None:
        """Add the digests after each row from row ``rows`` on, as another object computed them."""
        self._after[rows:] = digests

    @property
    def digests(self) -> Sequence[str]:
        """The digest after each row so far."""
        return self._after

    def after(self, rows: int) -> str | None:
        """The digest of the first ``rows`` rows, hex; None before there are any."""
        return self._after[rows - 1] if 0 < rows <= len(self._after) else None


def row_digest(row: Floats) -> str:
    """``logits_digest`` of one row, whatever it holds."""
    return hashlib.sha256(np.ascontiguousarray(row + np.float32(0.0), "<f4").data).hexdigest()


HASHING_THREADS = 4
MAX_WAITING_ROWS = 16
"""Rows of an object that wait to be hashed before its caller waits, too."""


class RowDigests:
    """The ``digest`` of every row. Call the object with further rows; other threads hash them, so
    that the caller goes on with the next step.

    One thread at a time adds rows. Any thread may read meanwhile: reading changes nothing."""

    def __init__(self, digest: Callable[[Floats], str] = row_digest) -> None:
        self.digest = digest
        self._rows: list[Future[str] | str] = []

    def __call__(self, first: int, rows: Floats) -> None:
        """Add rows, float32[rows, n], which nobody changes afterwards."""
        pool = thread_pool("hashing", HASHING_THREADS)
        for row in rows:
            waited_for = len(self._rows) - MAX_WAITING_ROWS
            if waited_for >= 0:
                self._rows[waited_for] = _digest_of_row(self._rows[waited_for])
            self._rows.append(pool.submit(self.digest, row))

    def first(self, rows: int) -> list[str]:
        """The digests of the first ``rows`` rows, once they are there."""
        return [_digest_of_row(row) for row in self._rows[:rows]]

    def since(self, rows: int) -> list[str]:
        """The digests of all rows from row ``rows`` on, once they are there."""
        return [_digest_of_row(row) for row in self._rows[rows:]]

    def note(self, rows: int, digests: Sequence[str]) -> None:
        """Add the digests of rows from row ``rows`` on, as another object computed them."""
        self._rows[rows:] = digests


def _digest_of_row(row: Future[str] | str) -> str:
    return row if isinstance(row, str) else row.result()


def file_digest(path: Path) -> str:
    """SHA-256 of a whole file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
