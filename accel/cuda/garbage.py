"""Pauses the garbage collector.

Finalizers free device objects, and the collector runs them in the middle of whatever its thread is
doing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()


class _Pauses:
    """The number of pauses, and whether the collector was enabled before the first."""

    number = 0
    collected = True


@contextmanager
def nothing_collected() -> Iterator[None]:
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
