"""Reads a mapped model file into memory and into the process's page table ahead of its use."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from reference.model.gguf.shard import Shard

MOST_BYTES = 1 << 30
"""Most bytes to read ahead; reading more takes so long that the first bytes no longer matter."""
PIECE_BYTES = 1 << 25
"""Bytes per call; during a call the process can map no other memory."""
_POPULATE_READ = 22
"""The value of MADV_POPULATE_READ, from Linux 5.14 on. Other systems refuse it without harm."""


def read_ahead(shards: Sequence[Shard]) -> threading.Thread:
    """Start a daemon thread that reads the first shard."""
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
            # The view keeps the mapping alive even when the file is closed meanwhile.
            view = np.frombuffer(shard.mapping, np.uint8, min(shard.size, MOST_BYTES))
            for start in range(0, view.nbytes, PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                if madvise(piece.ctypes.data, piece.nbytes, _POPULATE_READ) != 0:
                    return
