"""Logs faults of the server itself."""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger("zinc_rt.serve")


def log_fault(event: str, error: BaseException) -> None:
    """Log the stack frames of ``error``, but not its message, which may contain a user's text."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s in\n%s", event, type(error).__name__, frames)
