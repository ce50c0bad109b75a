"""The console script ``zinc-rt``. Until all else is loaded, Ctrl-C ends the process at once."""

from __future__ import annotations

import signal


def entry() -> int:
    """Run the command line; returns the exit code."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        # A KeyboardInterrupt during an import would show a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from harness.cli.main import entry as run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
