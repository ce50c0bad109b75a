"""The console script ``zinc-rt``. Until all else is loaded, Ctrl-C ends the process at once.

This module imports the least that it can: what runs before ``entry`` shows a traceback at Ctrl-C.
"""

from __future__ import annotations

# The module ``signal`` imports several others.
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


def entry() -> int:
    """Run the command line; returns the exit code."""
    end_at_interrupt()
    from harness.cli.main import entry as run

    code = INTERRUPTED
    try:
        if _raises:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        code = run()
    except KeyboardInterrupt:
        # It met the first or the last lines of the command line, outside of its own handling.
        pass
    end_at_interrupt()
    return code
