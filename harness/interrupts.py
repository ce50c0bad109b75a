"""What Ctrl-C does outside of a command: it ends the process without a traceback.

This module imports the least that it can: until it has run, Ctrl-C shows a traceback.
"""

from __future__ import annotations

# The module ``signal`` imports several others, and type checkers do not know this one.
import _signal  # type: ignore[import-not-found]

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, as shells have it."""

_raises = False
"""Whether Ctrl-C raised KeyboardInterrupt when this process began; a job in the background may
ignore it."""


def end_at_interrupt() -> None:
    """Let Ctrl-C end the process without a word, where it raises KeyboardInterrupt."""
    global _raises
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        _raises = True


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, where it did when the process began."""
    if _raises:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
