"""A KeyboardInterrupt at a line of the product."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
INTERRUPTED = "/reference/"
"""Files whose lines count."""


def interrupted_at(line: int, call: Callable[[], T]) -> T:
    """What ``call`` gives, unless so many lines of the product are run in it: then a
    KeyboardInterrupt comes before the last of them. Finalizers, which could run anywhere, wait."""
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
