"""Built kernels: why one could not be, and binaries kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from contract.errors import TierError

DIGEST_BYTES = 32
MAX_LOG_CHARACTERS = 4000

Progress = Callable[[str], None]
"""Called with one line before something that takes seconds."""


class BuildError(TierError):
    """The device's compiler rejected the program. ``log`` is what it said."""

    def __init__(self, device: str, kernel: str, log: str) -> None:
        self.kernel = kernel
        self.log = log
        super().__init__(f"{device}: building {kernel} failed: {log[:MAX_LOG_CHARACTERS].strip()}")


def cache_entry(cache: Path | None, identity: tuple[str, ...]) -> Path | None:
    """The file for a binary of exactly this request: everything its bytes depend on."""
    if cache is None:
        return None
    return cache / f"{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()}.bin"


def read_binary(path: Path | None, magic: bytes) -> bytes | None:
    """The binary in a cache entry; None when it is absent or damaged."""
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, binary = data[len(magic) :][:DIGEST_BYTES], data[len(magic) + DIGEST_BYTES :]
    if not data.startswith(magic) or hashlib.sha256(binary).digest() != digest:
        return None
    return binary


def write_binary(path: Path | None, magic: bytes, binary: bytes) -> None:
    """Atomically; another process may write the same entry. A full or read-only disk is no error:
    the next start compiles again."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(magic + hashlib.sha256(binary).digest() + binary)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
