"""The counts of the disk cache."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """Counts since the start: ``tokens`` of prompts that came from disk, files and bytes that were
    ``read`` and ``written``, pages and states that were ``dropped`` because they were evicted while
    the queue was full or because a write failed, and files that were ``ignored`` since they are not
    what their names say. ``used_bytes`` are those of all files when they were last counted, of at
    most ``most_bytes``. ``problem`` says why the latest access to the disk failed, "" where it did
    not."""

    tokens: int = 0
    read: int = 0
    read_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    ignored: int = 0
    used_bytes: int = 0
    most_bytes: int = 0
    problem: str = ""
