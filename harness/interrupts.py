"""Ctrl-C outside of a command ends the process without a traceback.

This module imports the least that it can: until it has run, Ctrl-C shows a traceback."""

from __future__ import annotations

# The module ``signal`` imports several others, and type checkers do not know this one.
import _signal  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, as shells have it."""
BROKEN_PIPE = 141
"""The same of one whose output nobody reads any more."""

_raises = False
"""Whether Ctrl-C raised KeyboardInterrupt when this process began; a job in the background may
ignore it."""
_interrupted = False
"""Whether Ctrl-C was pressed since."""


def end_at_interrupt() -> None:
    """Let Ctrl-C end the process without a word, where it raises KeyboardInterrupt."""
    global _raises
    if raises_interrupt(_signal.getsignal(_signal.SIGINT)):
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        _raises = True


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, where it did when the process began."""
    if _raises:
        _signal.signal(_signal.SIGINT, _interrupt)


def raises_interrupt(handler: object) -> bool:
    """Whether a handler of SIGINT raises KeyboardInterrupt, as Python's own does."""
    return handler in (_signal.default_int_handler, _interrupt)


def is_interrupt(error: Exception) -> bool:
    """Whether an error is what Ctrl-C became in the import of a module: some libraries written in C
    replace KeyboardInterrupt by an ImportError."""
    return _interrupted and (isinstance(error, ImportError) or _met_import(error))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT as Python does, and remember it."""
    global _interrupted
    _interrupted = True
    _signal.default_int_handler(number, frame)


def _met_import(error: Exception) -> bool:
    """Whether the error came out of the import of a module."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        step = step.tb_next
    return False
