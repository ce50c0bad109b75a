"""Worker threads of the CPU tier, and the scratch memory each thread keeps.

A task computes its own disjoint output rows, so the number of threads changes no bit."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from contract.arrays import Array
from contract.processors import processors
from reference.thread_pool import thread_pool

Item = TypeVar("Item")

SCRATCH_VIEWS_MAX = 256
"""Most array shapes a thread caches. Steps take the same few again and again."""


@cache
def thread_count() -> int:
    """Processors that this process may keep busy, as they were when this was first called."""
    return processors()


@cache
def limit_blas() -> None:
    """Make every BLAS call in this process run on its calling thread.

    The workers split the rows themselves; a BLAS that also splits calls among all cores would only
    make them wait for each other."""
    import threadpoolctl

    threadpoolctl.threadpool_limits(1, user_api="blas")


def for_each(
    function: Callable[[Item], None], items: Sequence[Item], threads: int | None = None
) -> None:
    """Call ``function`` once with every item, on at most ``threads`` threads (None: all cores), of
    which the calling thread is one.

    Returns when no call runs any more. Raises the error of a call; then some items may not have
    been used."""
    queue = deque(items)

    def work() -> None:
        while True:
            try:
                item = queue.popleft()
            except IndexError:
                return
            function(item)

    helpers = min(threads or thread_count(), len(items)) - 1
    workers = thread_pool("cpu-tier", max(1, thread_count() - 1))
    futures = [workers.submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        queue.clear()
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


class Scratch(threading.local):
    """Named arrays that a thread reuses between calls. They grow as needed; their contents are
    undefined. Every thread has its own."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """A C-contiguous array of ``shape``, valid until the thread takes ``name`` again. The
        caller gives a name the same ``dtype`` every time."""
        view = self._views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            array = self._arrays.get(name)
            if array is None or array.size < size:
                array = self._arrays[name] = np.empty(size, dtype)
                self._views.clear()  # views would keep the smaller array alive
            if len(self._views) >= SCRATCH_VIEWS_MAX:
                self._views.clear()
            view = self._views[name, shape] = array[:size].reshape(shape)
        return view
