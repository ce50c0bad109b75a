"""Pauses of Python's collector of garbage.

A collection calls finalizers and callbacks of other modules, in the middle of whatever its thread
is doing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import FrameType

_LOCK = Lock()


class _Pauses:
    """The number of pauses, and whether the collector was enabled before the first."""

    number = 0
    collected = True


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """The collector is off until the block has ended, and the blocks of other threads."""
    with _LOCK:
        if _Pauses.number == 0:
            _Pauses.collected = gc.isenabled()
            gc.disable()
        _Pauses.number += 1
    try:
        yield
    finally:
        with _LOCK:
            _Pauses.number -= 1
            if _Pauses.number == 0 and _Pauses.collected:
                gc.enable()


def frame_of(thread: int) -> FrameType | None:
    """What a thread executes; None if it has ended.

    CPython 3.11 collects frames under a lock that beginning threads take. A collection there gives
    way to such a thread, and both wait for ever."""
    with garbage_collection_off():
        return sys._current_frames().get(thread)
