"""What a process that is ours does first, so that it is soon at work."""

from __future__ import annotations

import gc
import os

OPENCL_TIERS = ("auto", "opencl")

YOUNG_OBJECTS = 300_000
"""Made since the last search for garbage and still there, before there is another: a start makes a
third of them, which stay, and an engine at work makes hardly any garbage that needs a search."""
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
        from accel.opencl.driver import load_drivers

        load_drivers()
