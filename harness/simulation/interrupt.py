"""Raises a KeyboardInterrupt before a chosen line of the product."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
INTERRUPTED = "/reference/"
"""Lines of files with this in their path count."""


def interrupted_at(line: int, call: Callable[[], T]) -> T:
    """The result of ``call``. A KeyboardInterrupt is raised before the ``line``-th line of the
    product that it runs, if it runs as many. Garbage collection is off meanwhile, so that the count
    is the same in every run."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if INTERRUPTED not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
