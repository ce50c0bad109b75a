"""Reads a mapped model file into memory and into the process's page table ahead of its use."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from contract.file_reads import read_pages
from reference.model.gguf.shard import Shard

MOST_BYTES = 1 << 30
"""Most bytes to read ahead; reading more takes so long that the first bytes no longer matter."""


def read_ahead(shards: Sequence[Shard]) -> threading.Thread:
    """Start a daemon thread that reads the first shard."""
    thread = threading.Thread(target=_read, args=(shards[:1],), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read(shards: Sequence[Shard]) -> None:
    for shard in shards:
        # The view keeps the mapping alive even when the file is closed meanwhile.
        read_pages(np.frombuffer(shard.mapping, np.uint8, min(shard.size, MOST_BYTES)))
