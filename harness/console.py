"""Output of commands for people: single lines without control characters, and tables."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

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
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


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
