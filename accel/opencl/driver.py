"""Loads OpenCL drivers in a thread: the C code runs without Python's lock. PoCL starts a thread for
each processor, and ends the process where the system refuses one."""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from contextlib import suppress
from functools import cache

from accel.opencl.api import library_path

ANY_DEVICE = 0xFFFFFFFF


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
def refused_threads() -> int:
    """How many of the threads that a driver may start the system refuses, asked before it starts
    them; usually 0."""
    needed = os.cpu_count() or 1
    ended, hold = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        hold.wait()
        ended.release()

    started = 0
    with suppress(RuntimeError):
        while started < needed:
            _thread.start_new_thread(wait, ())
            started += 1
    hold.set()
    for _ in range(started):
        ended.acquire()
    return needed - started


def _load() -> None:
    if refused_threads():
        return
    with suppress(OSError, AttributeError):
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
