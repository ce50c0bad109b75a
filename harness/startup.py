"""What a process that is ours does first, so that it is soon at work."""

from __future__ import annotations

import gc

OPENCL_TIERS = ("auto", "opencl")

YOUNG_OBJECTS = 300_000
"""Made since the last search for garbage and still there, before there is another: a start makes a
third of them, which stay, and an engine at work makes hardly any garbage that needs a search."""


def collect_rarely() -> None:
    """Search for garbage far less often than Python does by itself, in the whole process."""
    gc.set_threshold(YOUNG_OBJECTS)


def load_ahead(tier: str) -> None:
    """Load a tier's drivers while Python loads the rest, where that takes long."""
    if tier in OPENCL_TIERS:
        from accel.opencl.driver import load_drivers

        load_drivers()
