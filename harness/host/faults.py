"""Faults of the server itself, in its log."""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger("zinc_rt.serve")


def log_fault(what: str, error: BaseException) -> None:
    """Stack frames of ``error``. Frames only: its message may hold what a user wrote."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s in\n%s", what, type(error).__name__, frames)
