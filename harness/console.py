"""Output of commands for people: single lines without control characters, and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def printable(text: str) -> str:
    """``text`` on one line; characters that could control a terminal are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def note(text: str) -> None:
    """Print one line on standard error."""
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
