"""Output of commands for people: single lines without control characters, and tables."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Errors of a system call that a disk causes, not a network and not this program."""
_silent = False


def silence(silent: bool) -> None:
    """From now on print no notes and no progress, or print them again."""
    global _silent
    _silent = silent


def is_silent() -> bool:
    """Whether notes and progress are left out."""
    return _silent


def printable(text: str) -> str:
    """``text`` on one line; characters that could control a terminal are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def text_of_name(name: str) -> str:
    """The name of a file as text: bytes that are no UTF-8 are escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


def note(text: str) -> None:
    """Print one line on standard error, unless silenced. What cannot be written is lost."""
    if not _silent:
        complain(text)


def complain(text: str) -> None:
    """Print one line on standard error in any case, as far as it can be written."""
    print(printable(text), file=LossyStream(sys.stderr), flush=True)


class LossyStream:
    """A stream for people, None where there is none. What it refuses is lost, so that no work fails
    because nobody reads of it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # ValueError: it was closed.
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False


def table(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> str:
    """Rows as aligned columns; columns with a number in ``right`` are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
