"""Cache files of built kernels; a digest in each reveals damaged and foreign files."""

from __future__ import annotations

import contextlib
from pathlib import Path

from accel.digests import DIGEST_BYTES, digest
from contract.cached_files import remove_abandoned, replacing


def read_entry(path: Path, magic: bytes) -> bytes | None:
    """The data in a cache entry; None when it is absent, damaged or not of this ``magic``."""
    try:
        with path.open("rb") as file:
            # Checked first: a foreign file may be larger than memory.
            if file.read(len(magic)) != magic:
                return None
            found, data = file.read(DIGEST_BYTES), file.read()
    except (OSError, MemoryError):
        return None
    return data if digest(data).digest() == found else None


def write_entry(path: Path, magic: bytes, data: bytes) -> None:
    """Write the file atomically, since another process may write the same entry.

    A full or read-only disk is no error: the next start builds again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent)
        with replacing(path, 0o600) as file:
            file.write(magic + digest(data).digest() + data)
