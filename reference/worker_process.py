"""A child process that answers lines with lines and may be killed at any time.

It processes untrusted input, such as templates and grammars. The child limits its own memory and
processor time, this side the time of each answer. It starts on first use and is replaced when it
dies.

Threads may share it. An answer may hold a stranger's conversation, so nobody gets it but who asked:
one question at a time, whose number its answer repeats. A child that owes an answer, or gave one
too many, is replaced."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
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
REMEDIES = {
    errno.EAGAIN: "; raise the limit of processes, ulimit -u",
    errno.EMFILE: "; raise the limit of open files, ulimit -n",
    errno.ENOMEM: "; end other programs",
}
"""What to do where the system refuses to start a process, by its error number."""
SIGPROF = -getattr(signal, "SIGPROF", 0)
SIGKILL = -getattr(signal, "SIGKILL", 0)


class WorkerEnded(Exception):
    """The child gave no answer; the message says why. Another one is started by the next call."""


class WorkerRefused(WorkerEnded):
    """The system refuses to start the child."""


class WorkerProcess:
    """A Python ``script`` as a child, which threads may share.

    ``setup`` gives the line it is sent first. An answer takes at most ``wall_seconds`` after the
    earlier ones, and ``longest_reply`` bytes; the script ends itself with SIGPROF after
    ``cpu_seconds``."""

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
        self._answers: select.poll
        """Waits for what the child writes."""
        self._lock = threading.Lock()
        self._number = 0
        """Of the last question."""
        self._owes = False
        """Whether the child may have got a question, or a part of one, that it has not answered."""

    def start(self) -> None:
        """Start the child now, without waiting for it, so that the first answer is fast."""
        with self._lock:
            self._running_child()

    def ask(self, line: bytes) -> bytes:
        """The child's answer to ``line``; both end with a newline. The child gets and gives each
        behind a number and a space. Raises WorkerEnded and WorkerRefused."""
        with self._lock:
            child = self._running_child()
            deadline = time.monotonic() + self._wall_seconds
            self._number += 1
            number = b"%d " % self._number
            # It stays so where Ctrl-C ends the wait.
            self._owes = True
            try:
                _send(child, number + line, deadline)
                answer = self._line_of(child, deadline)
            except TimeoutError:
                child.kill()
                answer = b""
            whole = answer.startswith(number) and answer.find(b"\n") == len(answer) - 1
            if not whole:
                raise WorkerEnded(self._why_it_ended(child, answer))
            self._owes = False
        return answer[len(number) :]

    def close(self) -> None:
        """End the child. A later question would start another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        # First, so that the child is used no more where Ctrl-C comes between.
        self.child = None
        if self._end_child is not None:
            self._end_child()
        self._end_child = None
        self._owes = False

    def _running_child(self) -> subprocess.Popen[bytes]:
        child = self.child
        # One that was killed while it waited was so by the fault of no question.
        if child is not None and not self._owes and child.poll() is None:
            unasked = self._answers.poll(0)
            if not unasked:
                return child
        self._end()
        try:
            child = start_process(self._script)
        except OSError as error:
            why = f"{system_words(error)}{REMEDIES.get(error.errno or 0, '')}"
            raise WorkerRefused(f"its process cannot be started ({why})") from None
        self._end_child = weakref.finalize(self, _end, child)
        assert child.stdin is not None
        assert child.stdout is not None
        os.set_blocking(child.stdin.fileno(), False)
        self._answers = select.poll()
        self._answers.register(child.stdout, select.POLLIN)
        _send(child, self._setup(), float("inf"))
        self.child = child
        return child

    def _line_of(self, child: subprocess.Popen[bytes], deadline: float) -> bytes:
        """A line that the child writes, or what there is of it when it has the length of the
        longest reply or the child is gone. Raises TimeoutError at ``deadline``."""
        assert child.stdout is not None
        pipe, longest, answer = child.stdout.fileno(), self._longest_reply, bytearray()
        while len(answer) < longest and not answer.endswith(b"\n"):
            _wait_for(self._answers, deadline)
            part = os.read(pipe, min(READ_BYTES, longest - len(answer)))
            if not part:
                break
            answer += part
        return bytes(answer)

    def _why_it_ended(self, child: subprocess.Popen[bytes], answered: bytes) -> str:
        self._end()
        if answered.endswith(b"\n"):
            return "its reply is to no question, or to another one"
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
                room = select.poll()
                room.register(pipe, select.POLLOUT)
                _wait_for(room, deadline)
    except ConnectionError:
        # That the child has ended is noticed when its answer is read.
        return


def _wait_for(poll: select.poll, deadline: float) -> None:
    """Wait until a pipe can be used. Waiting in the kernel wakes no other thread of this process,
    as a timer would."""
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
