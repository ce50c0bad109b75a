"""The counts of the disk cache."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """Counts since the start: prompt ``tokens`` that came from disk; files and bytes ``read`` and
    ``written``; pages and states ``dropped`` because they were evicted while the queue was full or
    a write failed; files ``ignored`` because their contents do not match their names.
    ``used_bytes``, of at most ``max_bytes``, is from the latest count. ``problem`` says why the
    latest access to the disk failed, "" if it did not."""

    tokens: int = 0
    read: int = 0
    read_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    ignored: int = 0
    used_bytes: int = 0
    max_bytes: int = 0
    problem: str = ""
