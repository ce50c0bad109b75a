"""Shared parts of kernel builds: the error, the progress callback and the name of a cached
binary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from accel.digests import digest
from contract.errors import TierError

MAX_LOG_CHARACTERS = 4000

Progress = Callable[[str], None]
"""Called with one line of text before something that takes seconds."""


class BuildError(TierError):
    """The device's compiler rejected a kernel; ``log`` is the compiler's output."""

    def __init__(self, device: str, kernel: str, log: str) -> None:
        self.kernel = kernel
        self.log = log
        super().__init__(f"{device}: building {kernel} failed: {log[:MAX_LOG_CHARACTERS].strip()}")


def cache_entry(cache: Path | None, identity: tuple[str, ...]) -> Path | None:
    """The file of a cached binary; ``identity`` is everything that its bytes depend on."""
    if cache is None:
        return None
    return cache / f"{digest(chr(0).join(identity).encode()).hexdigest()}.bin"
