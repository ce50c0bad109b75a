"""A child process that answers lines with lines and may be killed at any time.

It processes untrusted input, such as templates and grammars. The child limits its own memory and
processor time, this side the time of each answer. It starts on first use and is replaced when it
dies.

Threads may ask at once. The child answers in order, and reads the next question from its pipe while
the answer to the last one is taken: it never waits for a thread that waits for the interpreter."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
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


class _Question:
    """A ``line`` for the child, and the place of its thread among those who use the child.
    ``unsent`` are its bytes that are not in the pipe; both are empty once it is answered. ``came``
    is released when all before it are over, for a thread that waits."""

    __slots__ = ("came", "line", "over", "unsent")

    def __init__(self, line: bytes = b"") -> None:
        self.line = self.unsent = line
        self.over = False
        self.came: threading.Lock | None = None


class WorkerProcess:
    """A Python ``script`` as a child, which threads may share.

    ``setup`` gives the line it is sent first. An answer takes at most ``wall_seconds`` once the
    earlier ones are there, and ``longest_reply`` bytes; the script ends itself with SIGPROF after
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
        self._lock = threading.RLock()
        self._turns: deque[_Question] = deque()
        self._answers: select.poll
        """Waits for what the child writes."""
        self._received = bytearray()
        """What the child wrote behind the answers that were taken."""

    def start(self) -> None:
        """Start the child now, without waiting for it, so that the first answer is fast."""
        question = _Question()
        try:
            self._wait_for_turn(question)
            self._running_child()
        finally:
            self._leave(question)

    def ask(self, line: bytes) -> bytes:
        """The child's answer to ``line``; both end with a newline. Raises WorkerEnded and
        WorkerRefused."""
        question = _Question(line)
        try:
            self._wait_for_turn(question)
            return self._answer_to(question)
        finally:
            self._leave(question)

    def close(self) -> None:
        """End the child, after the questions that were asked before. A later question would start
        another."""
        question = _Question()
        try:
            self._wait_for_turn(question)
            self._end()
        finally:
            self._leave(question)

    def _wait_for_turn(self, question: _Question) -> None:
        """Line up behind those who use the child. The line is sent ahead, if those before it are
        and the pipe has room."""
        with self._lock:
            if self._turns:
                self._leave()
            if self._turns:
                question.came = threading.Lock()
                question.came.acquire()
                if question.line and self.child is not None and not self._turns[-1].unsent:
                    question.unsent = _sent_at_once(self.child, question.line)
            self._turns.append(question)
        if question.came is not None:
            question.came.acquire()

    def _leave(self, question: _Question | None = None) -> None:
        """End a turn, which may not have come: Ctrl-C interrupts a wait. Then the next one may use
        the child, if it is not used."""
        passed = False
        with self._lock:
            if question is not None:
                question.over = True
            while self._turns and self._turns[0].over:
                left = self._turns.popleft()
                if left.unsent != left.line:
                    self._end()  # Its answer would be taken for the next one.
                passed = True
            if passed and self._turns:
                following = self._turns[0].came
                assert following is not None
                following.release()

    def _answer_to(self, question: _Question) -> bytes:
        child = self.child
        if question.unsent or child is None:
            child = self._running_child()
        deadline = time.monotonic() + self._wall_seconds
        try:
            if question.unsent:
                # Until all is sent it counts as sent in part.
                unsent, question.unsent = question.unsent, question.unsent[-1:]
                _send(child, unsent, deadline)
                question.unsent = b""
                if len(self._turns) > 1:
                    self._send_ahead()
            answer = self._next_line(child, deadline)
        except TimeoutError:
            child.kill()
            answer = b""
        if not answer.endswith(b"\n"):
            raise WorkerEnded(self._why_it_ended(child, answer))
        question.line = b""
        return answer

    def _send_ahead(self) -> None:
        """Send the lines of those who wait, as many as the pipe has room for."""
        with self._lock:
            for turn in self._turns:
                if turn.unsent and self.child is not None:
                    turn.unsent = _sent_at_once(self.child, turn.unsent)
                if turn.unsent:
                    return

    def _end(self) -> None:
        with self._lock:
            if self._end_child is not None:
                self._end_child()
            self.child = self._end_child = None
            self._received.clear()
            for turn in self._turns:
                turn.unsent = turn.line

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self.child is not None and self.child.poll() is None:
            return self.child
        # One that was killed while it waited was so by the fault of no question.
        self._end()
        try:
            child = start_process(self._script)
        except OSError as error:
            why = system_words(error)
            if error.errno == errno.EAGAIN:
                why += "; raise the limit of processes, ulimit -u"
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

    def _next_line(self, child: subprocess.Popen[bytes], deadline: float) -> bytes:
        """The next line that the child writes, or what there is of it when it has the length of the
        longest reply or the child is gone. Raises TimeoutError at ``deadline``."""
        assert child.stdout is not None
        pipe, longest, received = child.stdout.fileno(), self._longest_reply, self._received
        end = received.find(b"\n", 0, longest) if received else -1
        while end < 0 and (looked := len(received)) < longest:
            _wait_for(self._answers, deadline)
            part = os.read(pipe, READ_BYTES)
            if not part:
                break
            received += part
            end = received.find(b"\n", looked, longest)
        end = min(longest, len(received)) if end < 0 else end + 1
        line = bytes(received[:end])
        del received[:end]
        return line

    def _why_it_ended(self, child: subprocess.Popen[bytes], answered: bytes) -> str:
        self._end()
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


def _sent_at_once(child: subprocess.Popen[bytes], line: bytes) -> bytes:
    """What is left of a line after writing as much as the pipe takes now."""
    assert child.stdin is not None
    try:
        return line[os.write(child.stdin.fileno(), line) :]
    except (BlockingIOError, ConnectionError):
        # That the child has ended is noticed when an answer is read.
        return line


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
