"""Random bytes of the system, drawn in blocks. Each draw releases Python's interpreter lock, and
then waits behind computing threads to get it back."""

from __future__ import annotations

import os
import threading

DRAWN_BYTES = 4096
_lock = threading.Lock()
_left = b""


def random_bytes(count: int) -> bytes:
    """``count`` unpredictable bytes."""
    global _left
    with _lock:
        if len(_left) < count:
            _left = os.urandom(DRAWN_BYTES)
        drawn, _left = _left[:count], _left[count:]
        return drawn


def random_bits(count: int) -> int:
    """An unpredictable integer of ``count`` bits."""
    return int.from_bytes(random_bytes(-(-count // 8))) >> -count % 8


def _forget() -> None:
    """After a fork: do not reuse the parent's bytes."""
    global _lock, _left
    _lock, _left = threading.Lock(), b""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
