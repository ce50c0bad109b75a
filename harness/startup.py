"""First actions of a process of ours, which make its start short."""

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

OPENCL_TIERS = ("opencl",)

YOUNG_OBJECTS = 300_000
"""Made since the last search for garbage and still there, before there is another: a start makes a
third of them, which stay, and an engine at work makes hardly any garbage that needs a search."""
WITH_LIBRARIES = ("numpy", "decimal", "hashlib", "heapq", "mmap", "tempfile")
"""Modules of a start that are libraries or bring some: the system loads one library at a time, and
a driver with a compiler in it takes as long as numpy."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
AGAIN_SECONDS = 0.001


def prepare_process() -> None:
    """Search for garbage far less often than Python does by itself, and let numpy's BLAS start no
    threads, unless the environment says how many: those of OpenBLAS wait for work on a core of
    their own while Python loads, and no tier has any for them. Comes before numpy. No Ctrl-C is
    lost from here on (`keep_interrupts`)."""
    gc.set_threshold(YOUNG_OBJECTS)
    os.environ.setdefault(BLAS_THREADS, "1")
    keep_interrupts()


def python_path() -> str:
    """PYTHONPATH of a child process that imports this source tree."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def keep_interrupts() -> None:
    """Send a KeyboardInterrupt that Python throws away once more.

    One that meets a finalizer or the callback of a weak reference, of which every import runs some,
    is reported as unraisable and forgotten, and the program goes on. The interrupt comes again a
    moment after that report, until it meets code that an exception can leave. Not on Windows, where
    no signal can be sent to a thread."""
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
    """Interrupt a thread once it is not in ``hook``, where an interrupt would be lost, too."""
    within: FrameType | None
    while True:
        time.sleep(AGAIN_SECONDS)
        within = sys._current_frames().get(thread)
        while within is not None and within.f_code is not hook:
            within = within.f_back
        if within is None:
            signal.pthread_kill(thread, signal.SIGINT)
            return


def load_ahead(tier: str) -> None:
    """Load a tier's drivers while Python loads the rest, where that takes long."""
    if tier in OPENCL_TIERS:
        for name in WITH_LIBRARIES:
            importlib.import_module(name)
        from accel.opencl.driver import load_drivers

        load_drivers()
