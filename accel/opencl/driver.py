"""Loads OpenCL drivers in a thread: the C code runs without Python's lock. PoCL starts a thread for
each processor, and ends the process where the system refuses one."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from functools import cache

from accel.opencl.api import library_path
from contract.errors import TierUnavailable

TIER = "opencl"
ANY_DEVICE = 0xFFFFFFFF
MOST_THREADS = "POCL_MAX_PTHREAD_COUNT"
"""PoCL's variable."""
THREADS_REFUSED = "the system refuses the threads that its driver needs, one for each processor"
THREADS_HINT = (
    "raise the limit of threads (ulimit -u, or the container's pids.max), "
    f"or set {MOST_THREADS} to fewer"
)
GONE_SECONDS = 1.0

_in_flight: list[threading.Thread] = []


def load_drivers() -> threading.Thread:
    """Start a thread that loads every driver and finds its devices.

    Errors in the thread are dropped: opening a device raises them again."""
    thread = threading.Thread(target=_load, name="OpenCL drivers")
    thread.start()
    _in_flight.append(thread)
    return thread


def wait_for_drivers() -> None:
    """Wait until no thread loads drivers: PoCL lists no devices while another thread searches for
    them."""
    for thread in list(_in_flight):
        thread.join()
        with suppress(ValueError):
            _in_flight.remove(thread)


@cache
def check_threads() -> None:
    """Raise TierUnavailable if the system refuses the threads that a driver may start. Asked once
    before they start, and again after a refusal, which is not cached."""
    hold, held = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(_needed_threads()):
            thread = threading.Thread(target=hold.wait, daemon=True)
            thread.start()
            held.append(thread)
    except RuntimeError:
        raise TierUnavailable(TIER, THREADS_REFUSED, THREADS_HINT) from None
    finally:
        hold.set()
        for thread in held:
            thread.join()
            _wait_until_gone(thread)


def _needed_threads() -> int:
    """How many threads PoCL starts: also for processors that this process may not run on."""
    with suppress(ValueError):
        return max(1, int(os.environ.get(MOST_THREADS, "")))
    return os.cpu_count() or 1


def _wait_until_gone(thread: threading.Thread) -> None:
    """Wait until the system counts a thread no more, which is after Python's join."""
    deadline = time.monotonic() + GONE_SECONDS
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0.0001)


def _load() -> None:
    with suppress(OSError, AttributeError, TierUnavailable):
        check_threads()
        library = ctypes.CDLL(library_path())
        count = ctypes.c_uint()
        if library.clGetPlatformIDs(0, None, ctypes.byref(count)) != 0:
            return
        platforms = (ctypes.c_void_p * count.value)()
        library.clGetPlatformIDs(count, platforms, None)
        for platform in platforms:
            any_device = ctypes.c_ulong(ANY_DEVICE)
            found = ctypes.byref(ctypes.c_uint())
            library.clGetDeviceIDs(ctypes.c_void_p(platform), any_device, 0, None, found)
