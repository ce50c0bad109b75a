"""A child process that answers lines with lines and may be killed at any time.

What a stranger wrote is worked on there: the child limits its own memory and time, and here it
is given so long for each answer. It is started on first use, kept, and replaced when it dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

PASSED_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TZ", "SYSTEMROOT")
"""Environment variables the child is given; it has no business with the others."""
ROOT = Path(__file__).parents[1]
RUN = (
    "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path(sys.argv[2], None, '__main__')"
)
"""How a script is run: it may import the packages of this project."""
SIGPROF = -getattr(signal, "SIGPROF", 0)
SIGKILL = -getattr(signal, "SIGKILL", 0)


class WorkerEnded(Exception):
    """The child gave no answer; the message says why. Another one is started by the next call."""


class WorkerProcess:
    """A Python ``script`` as a child, one conversation at a time: not for several threads at once.

    ``setup`` gives the line it is sent first. An answer takes at most ``wall_seconds`` and
    ``longest_reply`` bytes; the script ends itself with SIGPROF after ``cpu_seconds``.
    """

    def __init__(
        self,
        script: Path,
        setup: Callable[[], bytes],
        *,
        wall_seconds: float,
        cpu_seconds: float,
        longest_reply: int,
    ) -> None:
        self._script = script
        self._setup = setup
        self._wall_seconds = wall_seconds
        self._cpu_seconds = cpu_seconds
        self._longest_reply = longest_reply
        self.child: subprocess.Popen[bytes] | None = None
        self._end_child: Callable[[], object] | None = None

    def start(self) -> None:
        """Start the child now, without waiting for it, so that the first answer is fast."""
        self._running_child()

    def ask(self, line: bytes) -> bytes:
        """The child's answer to ``line``; both end with a newline. Raises WorkerEnded."""
        child = self._running_child()
        assert child.stdout is not None
        timer = threading.Timer(self._wall_seconds, child.kill)
        timer.daemon = True
        timer.start()
        try:
            _send(child, line)
            answer = child.stdout.readline(self._longest_reply)
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            raise WorkerEnded(self._why_it_ended(child, answer))
        return answer

    def close(self) -> None:
        """End the child. A later question would start another."""
        if self._end_child is not None:
            self._end_child()
        self.child = self._end_child = None

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self.child is not None:
            return self.child
        environment = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", RUN, str(ROOT), str(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerEnded(f"its process cannot be started ({error})") from None
        self.child = child
        self._end_child = weakref.finalize(self, _end, child)
        _send(child, self._setup())
        return child

    def _why_it_ended(self, child: subprocess.Popen[bytes], answered: bytes) -> str:
        self.close()
        if answered:
            return "its reply is too long"
        if child.returncode == SIGPROF:
            return f"it ran longer than {self._cpu_seconds:g} s"
        if child.returncode == SIGKILL:
            return f"it did not answer in {self._wall_seconds:g} s or was killed"
        return f"its process ended with status {child.returncode}"


def _send(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except OSError:
        # A child that is gone shows in what it answers: nothing.
        return


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    assert child.stdin is not None
    assert child.stdout is not None
    for pipe in (child.stdin, child.stdout):
        try:
            pipe.close()
        except OSError:
            continue
    child.wait()
