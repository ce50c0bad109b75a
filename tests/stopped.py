"""Children of this process that do not run for a while."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def stop(pid: int) -> None:
    """Stop a child of this process. The signal is only the beginning: until its main thread has had
    a processor, its other threads go on, and may answer."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A child of this process does nothing meanwhile."""
    stop(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # It may have been killed.
            os.kill(pid, signal.SIGCONT)
