"""The first actions of one of our processes; they shorten its start."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import CodeType, FrameType

from contract.garbage import frame_of

OPENCL_TIERS = ("opencl",)

YOUNG_OBJECTS = 300_000
"""Garbage is collected after this many new objects. A start creates a third as many, which all stay
in use, and a running engine creates hardly any cycles."""
WITH_LIBRARIES = ("numpy", "decimal", "hashlib", "heapq", "mmap", "tempfile")
"""Modules that load shared libraries. They are loaded before an OpenCL driver: the system loads
one library at a time, and a driver with its compiler takes as long as numpy."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
AGAIN_SECONDS = 0.001


def prepare_process() -> None:
    """Set up garbage collection, BLAS threads and Ctrl-C. Call it before numpy is imported.

    Garbage is collected far less often than by default. Numpy's BLAS starts no threads unless the
    environment sets their number: no tier uses them, and OpenBLAS threads spin on a core while
    Python loads. From now on no Ctrl-C is lost; see ``keep_interrupts``."""
    gc.set_threshold(YOUNG_OBJECTS)
    os.environ.setdefault(BLAS_THREADS, "1")
    keep_interrupts()


def finish_process() -> None:
    """Leave all objects to the system when the process ends. Python would search them for garbage
    several times, which takes 5 % of a short command."""
    gc.freeze()


def python_path() -> str:
    """PYTHONPATH of a child process that imports this source tree."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def keep_interrupts() -> None:
    """Repeat a KeyboardInterrupt that Python discards.

    If Ctrl-C arrives in a finalizer or in the callback of a weak reference, which every import
    runs, Python reports the exception as unraisable and goes on. The interrupt is then sent again,
    until it arrives in code that can raise it. Not on Windows, where a thread cannot be sent a
    signal."""
    if sys.platform == "win32":
        return
    report = sys.unraisablehook

    def interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report(unraisable)
            return
        main = threading.main_thread().ident
        assert main is not None
        hook = interrupt_again.__code__
        thread = threading.Thread(target=_interrupt_outside, args=(main, hook), daemon=True)
        # Python that is shutting down starts no threads, and is ending anyway.
        with suppress(RuntimeError):
            thread.start()

    sys.unraisablehook = interrupt_again


def _interrupt_outside(thread: int, hook: CodeType) -> None:
    """Interrupt a thread as soon as it has left ``hook``, in which an interrupt would be lost
    again."""
    within: FrameType | None
    while True:
        time.sleep(AGAIN_SECONDS)
        within = frame_of(thread)
        while within is not None and within.f_code is not hook:
            within = within.f_back
        if within is None:
            signal.pthread_kill(thread, signal.SIGINT)
            return


def load_ahead(tier: str) -> None:
    """Load the drivers of a tier while Python loads the other modules, if that takes long."""
    if tier in OPENCL_TIERS:
        for name in WITH_LIBRARIES:
            importlib.import_module(name)
        from accel.opencl.driver import load_drivers

        load_drivers()
