"""The worker pool of ``pool.c``: threads that execute steps in the order of their submission."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.native.library import Library
from accel.native.names import TIER
from contract.errors import DeviceLost, TierUnavailable
from contract.lazy_dataclass import dataclass

MAX_WORKERS = 1024
RING_STEPS = 64
"""Most steps in flight; submitting one more waits until the oldest has ended."""
NUMBERS = 1 << 32
"""Steps are numbered modulo this."""
WAIT_SECONDS = 0.1
"""Longest time of one wait in C, so that Python's signal handlers run in between."""

Copies = NDArray[np.uint64]
"""Rows of a source address, a target address, and a number of bytes."""


class Job(ctypes.Structure):
    """The structure ``JOB`` of ``pool.c``."""

    _fields_ = (
        ("scratch", ctypes.c_uint64),
        ("own", ctypes.c_uint64),
        ("own_bytes", ctypes.c_uint64),
        ("input", ctypes.c_uint64),
        ("packets", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("cancelled", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("copy_count", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of the library that Python calls."""

    open: Any
    close: Any
    completed: Any
    times: Any
    submit: Any
    wait: Any


def _functions(library: Library) -> Functions:
    pool, number = ctypes.c_void_p, ctypes.c_uint32

    def of(owner: Any, name: str, result: Any, *arguments: Any) -> Any:
        function = owner[f"zinc_{name}"]
        function.restype, function.argtypes = result, arguments
        return function

    return Functions(
        of(library.handle, "open", pool, number),
        of(library.handle, "close", None, pool),
        of(library.handle, "completed", ctypes.POINTER(number), pool),
        of(library.handle, "times", ctypes.POINTER(ctypes.c_uint64), pool),
        of(library.quick, "submit", number, pool, ctypes.POINTER(Job)),
        of(library.handle, "wait", ctypes.c_int, pool, number, ctypes.c_uint64),
    )


FORKED = "this process was forked from the one that opened the tier; open it in this one"


class WorkerPool:
    """``workers`` threads that execute steps. Only one Python thread may use it at a time. Raises
    TierUnavailable when the system cannot start that many threads."""

    def __init__(self, library: Library, workers: int) -> None:
        self.workers = workers
        self._functions = functions = _functions(library)
        self._pool = functions.open(workers)
        if not self._pool:
            reason = f"the system cannot start {workers} threads"
            raise TierUnavailable(TIER, reason, "allow fewer with --threads")
        self._completed = functions.completed(self._pool)
        self._times = functions.times(self._pool)
        self._process = os.getpid()
        self._last = 0
        self._finalizer = weakref.finalize(self, _close, functions, self._pool, self._process)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that has the threads."""
        return os.getpid() != self._process

    def submit(self, job: Job) -> int:
        """Queue a step and return its number. Raises DeviceLost in a forked process."""
        if self.forked:
            raise DeviceLost(FORKED)
        self._last = number = self._functions.submit(self._pool, ctypes.byref(job))
        return int(number)

    def done(self, number: int) -> bool:
        """Whether a step has ended."""
        return _is_reached(int(self._completed[0]), number)

    def seconds(self, number: int) -> float:
        """Seconds from begin to end of one of the last RING_STEPS steps."""
        return float(self._times[number % RING_STEPS]) * 1e-9

    def wait(self, number: int, seconds: float) -> bool:
        """Sleep until a step has ended; False if it has not after ``seconds``."""
        while not self._functions.wait(self._pool, number, int(min(seconds, WAIT_SECONDS) * 1e9)):
            seconds -= WAIT_SECONDS
            if seconds <= 0:
                return self.done(number)
        return True

    def finish(self) -> None:
        """Wait for all steps."""
        while not (self.forked or self.wait(self._last, WAIT_SECONDS)):
            pass

    def close(self) -> None:
        """Wait for all steps and end the threads. Safe to call twice."""
        self._finalizer()


def _is_reached(completed: int, number: int) -> bool:
    return (completed - number) % NUMBERS < NUMBERS // 2


def _close(functions: Functions, pool: int, process: int) -> None:
    # A forked process does not have the threads.
    if os.getpid() == process:
        functions.close(pool)


def copies_of(copied: Sequence[tuple[int, NDArray[np.uint8]]]) -> Copies:
    """The copies of a job, from addresses to arrays."""
    rows = [(source, target.ctypes.data, target.nbytes) for source, target in copied]
    return np.array(rows, np.uint64).reshape(-1, 3)
