"""Measures how fast a file comes from its disk."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

BLOCK_BYTES = 4 << 20
MAX_SECONDS = 0.2


def disk_rate(path: Path) -> float | None:
    """Bytes a second that the disk of ``path`` gives to one reader, without what the system holds
    of the file in memory; None where that cannot be measured. It reads for about MAX_SECONDS."""
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY | direct)
    except OSError:
        return None
    done, begin = 0, time.perf_counter()
    try:
        # Direct reads need memory at a page boundary, as a mapping is.
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            while time.perf_counter() - begin < MAX_SECONDS:
                count = os.preadv(file, [block], done)
                done += count
                if count < BLOCK_BYTES:
                    break
    except OSError:
        return None
    finally:
        os.close(file)
    return done / max(time.perf_counter() - begin, 1e-9) if done else None
