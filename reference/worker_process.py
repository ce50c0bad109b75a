"""A child process that answers lines with lines and may be killed at any time.

It processes untrusted input, such as templates and grammars. The child limits its own memory and
processor time, this side the time of each answer. It starts on first use and is replaced when it
dies."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from contract.errors import system_words

if TYPE_CHECKING:
    import subprocess

PASSED_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TZ", "SYSTEMROOT")
"""Environment variables that the child receives: no others, which may hold secrets."""
READ_BYTES = 1 << 20
ROOT = Path(__file__).parents[1]
RUN = (
    "import sys; from importlib.machinery import SourceFileLoader as Loader; "
    "sys.path.append(sys.argv[1]); exec(Loader(__name__, sys.argv[2]).get_code(__name__))"
)
"""Arguments that run a script, which may import the packages of this project. Unlike ``runpy``, the
loader keeps its compiled code."""
SIGPROF = -getattr(signal, "SIGPROF", 0)
SIGKILL = -getattr(signal, "SIGKILL", 0)


class WorkerEnded(Exception):
    """The child gave no answer; the message says why. Another one is started by the next call."""


class WorkerRefused(WorkerEnded):
    """The system refuses to start the child."""


class WorkerProcess:
    """A Python ``script`` as a child, one conversation at a time: not for several threads at once.

    ``setup`` gives the line it is sent first. An answer takes at most ``wall_seconds`` and
    ``longest_reply`` bytes; the script ends itself with SIGPROF after ``cpu_seconds``."""

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
        """The child's answer to ``line``; both end with a newline. Raises WorkerEnded and
        WorkerRefused."""
        child = self._running_child()
        deadline = time.monotonic() + self._wall_seconds
        try:
            _send(child, line, deadline)
            answer = _line_of(child, self._longest_reply, deadline)
        except TimeoutError:
            child.kill()
            answer = b""
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
            if self.child.poll() is None:
                return self.child
            # It was killed while it waited, which is the fault of no question.
            self.close()
        try:
            child = start_process(self._script)
        except OSError as error:
            why = system_words(error)
            if error.errno == errno.EAGAIN:
                why += "; raise the limit of processes, ulimit -u"
            raise WorkerRefused(f"its process cannot be started ({why})") from None
        self.child = child
        self._end_child = weakref.finalize(self, _end, child)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        _send(child, self._setup(), float("inf"))
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


def start_process(script: Path) -> subprocess.Popen[bytes]:
    """Start Python with ``script`` and pipes to it, in a session of its own. Raises OSError."""
    # Imported here, because not every start has a template.
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, str(ROOT), str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=passed_environment(),
        start_new_session=True,
    )


def passed_environment() -> dict[str, str]:
    """The environment variables that the child receives."""
    return {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}


def _send(child: subprocess.Popen[bytes], line: bytes, deadline: float) -> None:
    """Write a line. Raises TimeoutError if the child does not read it until ``deadline``."""
    assert child.stdin is not None
    pipe, left = child.stdin.fileno(), memoryview(line)
    try:
        while left:
            try:
                left = left[os.write(pipe, left) :]
            except BlockingIOError:
                _wait_for(pipe, select.POLLOUT, deadline)
    except ConnectionError:
        # That the child has ended is noticed when its answer is read.
        return


def _line_of(child: subprocess.Popen[bytes], longest: int, deadline: float) -> bytes:
    """A line that the child writes, or what there is of it when it has ``longest`` bytes or the
    child is gone. Raises TimeoutError at ``deadline``."""
    assert child.stdout is not None
    pipe, answer = child.stdout.fileno(), bytearray()
    while len(answer) < longest and not answer.endswith(b"\n"):
        _wait_for(pipe, select.POLLIN, deadline)
        part = os.read(pipe, min(READ_BYTES, longest - len(answer)))
        if not part:
            break
        answer += part
    return bytes(answer)


def _wait_for(pipe: int, event: int, deadline: float) -> None:
    """Wait until a pipe can be used. Waiting in the kernel wakes no other thread of this process,
    as a timer would."""
    poll = select.poll()
    poll.register(pipe, event)
    left = deadline - time.monotonic()
    if left < 0 or not poll.poll(None if left == float("inf") else 1000 * left):
        raise TimeoutError


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
