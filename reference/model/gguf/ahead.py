"""Mapped files brought into memory, and into the process's page table, ahead of who reads them."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from reference.model.gguf.shard import Shard

MOST_BYTES = 1 << 30
"""Of a file: whoever reads more does so long enough not to be kept waiting by the first bytes."""
PIECE_BYTES = 1 << 25
"""At a time: meanwhile the process can map nothing else."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14 and later. Others refuse it, which does no harm."""


def read_ahead(shards: Sequence[Shard]) -> threading.Thread:
    """Begin with the first shard, in a thread that the end of the process does not wait for."""
    thread = threading.Thread(target=_read, args=(shards[:1],), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read(shards: Sequence[Shard]) -> None:
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for shard in shards:
            # Holds the mapping even when the file is closed meanwhile.
            view = np.frombuffer(shard.mapping, np.uint8, min(shard.size, MOST_BYTES))
            for start in range(0, view.nbytes, PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                if madvise(piece.ctypes.data, piece.nbytes, _POPULATE_READ) != 0:
                    return
