"""Times in which no garbage is collected.

Finalizers give back what a device has, and the collector runs them in whatever its thread is doing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()


class _Pauses:
    """How many there are, and whether garbage was collected before the first."""

    number = 0
    collected = True


@contextmanager
def nothing_collected() -> Iterator[None]:
    """The collector of garbage waits until the block has ended, and those of other threads."""
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
