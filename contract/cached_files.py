"""The files of a cache folder, and which of them make room."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class CachedFile(NamedTuple):
    """A file of a cache: its bytes, and when it was used last, in nanoseconds."""

    path: Path
    nbytes: int
    used: int


def least_used(
    files: Iterable[CachedFile], most_bytes: int, most_files: int | None = None
) -> list[CachedFile]:
    """The files to remove, least recently used first, so that at most ``most_bytes`` bytes and
    ``most_files`` files stay; None is any number of files."""
    left = sorted(files, key=lambda file: file.used)
    total, count = sum(file.nbytes for file in left), len(left)
    removed = []
    for file in left:
        if total <= most_bytes and (most_files is None or count <= most_files):
            break
        removed.append(file)
        total, count = total - file.nbytes, count - 1
    return removed
