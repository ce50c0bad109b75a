"""The console script ``zinc-rt``. Until all else is loaded, Ctrl-C ends the process at once."""

from __future__ import annotations

from harness.interrupts import INTERRUPTED, end_at_interrupt, raise_at_interrupt

# Scripts that installers write do more between this import and the call.
end_at_interrupt()


def entry() -> int:
    """Run the command line; returns the exit code."""
    from harness.cli.main import entry as run

    code = INTERRUPTED
    try:
        raise_at_interrupt()
        code = run()
    except KeyboardInterrupt:
        # It met the first or the last lines of the command line, outside of its own handling.
        pass
    end_at_interrupt()
    return code
