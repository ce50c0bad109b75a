"""Random numbers of the system, drawn many at a time: each draw lets go of the interpreter, and a
thread gets it back behind those that wait for it."""

from __future__ import annotations

import os
import threading

DRAWN_BYTES = 4096
_lock = threading.Lock()
_left = b""


def random_bytes(count: int) -> bytes:
    """So many bytes that nobody can guess."""
    global _left
    with _lock:
        if len(_left) < count:
            _left = os.urandom(DRAWN_BYTES)
        drawn, _left = _left[:count], _left[count:]
        return drawn


def random_bits(count: int) -> int:
    """A number of so many bits that nobody can guess."""
    return int.from_bytes(random_bytes(-(-count // 8))) >> -count % 8


def _forget() -> None:
    """A child of this process draws bytes of its own."""
    global _lock, _left
    _lock, _left = threading.Lock(), b""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
