"""What a process that is ours does first, so that it is soon at work."""

from __future__ import annotations

import gc
import importlib
import os

OPENCL_TIERS = ("auto", "opencl")

YOUNG_OBJECTS = 300_000
"""Made since the last search for garbage and still there, before there is another: a start makes a
third of them, which stay, and an engine at work makes hardly any garbage that needs a search."""
WITH_LIBRARIES = ("numpy", "decimal", "hashlib", "heapq", "mmap", "tempfile")
"""Modules of a start that are libraries or bring some: the system loads one library at a time, and
a driver with a compiler in it takes as long as numpy."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def prepare_process() -> None:
    """Search for garbage far less often than Python does by itself, and let numpy's BLAS start no
    threads, unless the environment says how many: those of OpenBLAS wait for work on a core of
    their own while Python loads, and no tier has any for them. Comes before numpy."""
    gc.set_threshold(YOUNG_OBJECTS)
    os.environ.setdefault(BLAS_THREADS, "1")


def load_ahead(tier: str) -> None:
    """Load a tier's drivers while Python loads the rest, where that takes long."""
    if tier in OPENCL_TIERS:
        for name in WITH_LIBRARIES:
            importlib.import_module(name)
        from accel.opencl.driver import load_drivers

        load_drivers()
