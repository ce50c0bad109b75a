"""Reports of how far an upload is, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Progress = Callable[[int], None]
"""Called with the bytes uploaded since the last call."""
_LOCK = Lock()


def in_turn(progress: Progress | None) -> Progress:
    """A function for several threads that calls ``progress``, one call at a time."""

    def on_bytes(nbytes: int) -> None:
        if progress is not None:
            with _LOCK:
                progress(nbytes)

    return on_bytes
