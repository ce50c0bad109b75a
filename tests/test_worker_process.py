"""Threads share a child process: each gets the answer to its own question, whatever the others
ask."""

import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from reference import worker_process
from reference.worker_process import WorkerEnded, WorkerProcess
from tests.patience import PATIENCE_SECONDS, POLL_SECONDS, wait_until
from tests.worker_forks import OF_USERS, ForkServer

ECHO = """\
import os, sys
for line in sys.stdin.buffer:
    if line.endswith(b" end\\n"):
        os._exit(7)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""
TWICE = """\
import sys
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line + line)
    sys.stdout.buffer.flush()
"""
LATE = """\
import sys
last = b""
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(last or line)
    sys.stdout.buffer.flush()
    last = line
"""
THREADS = 8
Made = Callable[[str], WorkerProcess]


@pytest.fixture
def worker_of(tmp_path, monkeypatch) -> Iterator[Made]:
    """``worker_of(script)``: a child of its own."""
    monkeypatch.setattr(worker_process, "start_process", OF_USERS)
    made: list[WorkerProcess] = []

    def make(script: str) -> WorkerProcess:
        path: Path = tmp_path / f"{len(made)}.py"
        path.write_text(script)
        limits = {"wall_seconds": PATIENCE_SECONDS, "cpu_seconds": PATIENCE_SECONDS}
        made.append(WorkerProcess(path, lambda: b"", longest_reply=1 << 20, **limits))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@contextmanager
def held(worker: WorkerProcess) -> Iterator[None]:
    """A context in which the child runs but answers nothing."""
    worker.start()
    child = worker.child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)


def test_each_thread_gets_its_own_answer(worker_of):
    """Of questions that a pipe holds many of, and of ones that it does not hold."""
    worker = worker_of(ECHO)
    sizes = (1, 40_000, 10, 200_000, 3_000)

    def ask(thread: int) -> list[bool]:
        lines = [b"%d %d %b\n" % (thread, n, b"x" * sizes[n % 5]) for n in range(20)]
        return [worker.ask(line) == line for line in lines]

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(all(right) for right in pool.map(ask, range(THREADS)))


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_question_that_ends_the_child_fails_alone(worker_of, size):
    worker = worker_of(ECHO)
    lines = [b"a" * size + b"\n", b"end\n", b"b" * size + b"\n", b"end\n", b"c\n"]
    with ThreadPoolExecutor(THREADS) as pool:
        with held(worker):
            asked = [pool.submit(worker.ask, line) for line in lines]
        for line, one in zip(lines, asked, strict=True):
            if line == b"end\n":
                with pytest.raises(WorkerEnded, match="status 7"):
                    one.result()
            else:
                assert one.result() == line


def test_a_child_that_is_killed_costs_no_later_question_its_answer(worker_of):
    worker = worker_of(ECHO)
    with ThreadPoolExecutor(THREADS) as pool:
        worker.start()
        child = worker.child
        os.kill(child.pid, signal.SIGSTOP)
        first = pool.submit(worker.ask, b"a\n")
        wait_until(lambda: worker._owes)
        later = [pool.submit(worker.ask, line) for line in (b"b\n", b"c\n")]
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(WorkerEnded, match="was killed"):
            first.result()
        assert [one.result() for one in later] == [b"b\n", b"c\n"]


@pytest.fixture
def asking() -> Iterator[threading.Event]:
    """While it is set Ctrl-C interrupts, once. Signals are sent until then: one that comes just
    before a wait is seen behind it."""
    event, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def interrupt(*given: object) -> None:
        if event.is_set():
            event.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    yield event
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_an_interrupted_question_leaves_its_answer_to_nobody(worker_of, asking, others):
    """Ctrl-C ends a wait for an answer, or for the turn, in the main thread."""
    worker, main = worker_of(ECHO), threading.get_ident()
    lines = [b"%d\n" % n for n in range(others)]

    def interrupt() -> None:
        asking.wait()
        wait_until(lambda: worker._owes)
        while asking.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(POLL_SECONDS)

    def interrupted_question() -> None:
        pool.submit(interrupt)
        asking.set()
        worker.ask(b"interrupted\n")

    with ThreadPoolExecutor(THREADS) as pool:
        with held(worker):
            asked = [pool.submit(worker.ask, line) for line in lines]
            with pytest.raises(KeyboardInterrupt):
                interrupted_question()
            asked.append(pool.submit(worker.ask, b"later\n"))
        assert [one.result() for one in asked] == [*lines, b"later\n"]


def interrupted(ask: Callable[[], bytes], calls: int) -> bytes | None:
    """Its answer, or None if it is interrupted behind so many calls of the module's functions, or
    of what they call."""
    left = calls

    def trace(frame: FrameType, event: str, called: object) -> None:
        nonlocal left
        if frame.f_code.co_filename == worker_process.__file__ and event in ("call", "c_return"):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(trace)
    try:
        return ask()
    except KeyboardInterrupt:
        return None
    finally:
        sys.setprofile(None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("running", [True, False])
def test_an_interrupt_anywhere_leaves_its_answer_to_nobody(worker_of, monkeypatch, running):
    """Wherever Python looks for Ctrl-C, which is behind calls; then another thread asks. A process
    that just starts is left to the garbage collection, which warns."""
    monkeypatch.undo()
    worker, answers = worker_of(ECHO), []
    for calls in itertools.count(1):
        if running:
            worker.start()
        else:
            worker.close()
        own, later = b"own %d\n" % calls, b"later %d\n" % calls
        answer = interrupted(lambda own=own: worker.ask(own), calls)
        assert answer in (None, own)
        asking = threading.Thread(
            target=lambda later=later: answers.append(worker.ask(later)), daemon=True
        )
        asking.start()
        wait_until(lambda calls=calls: len(answers) == calls)
        assert answers[-1] == later
        if answer is not None:
            break
    assert calls > 10


def test_what_nobody_asked_for_is_no_answer(worker_of):
    worker = worker_of(ECHO)
    worker.start()
    pipes = worker.child
    os.write(pipes.stdin.fileno(), b"nobody's\n")
    assert select.select([pipes.stdout], [], [], PATIENCE_SECONDS)[0]
    assert worker.ask(b"mine\n") == b"mine\n"


def test_two_lines_are_no_answer(worker_of):
    worker = worker_of(TWICE)
    with pytest.raises(WorkerEnded, match="its reply is to no question, or to another one"):
        worker.ask(b"a\n")


def test_the_answer_to_another_question_is_none(worker_of):
    """One that comes late, behind a line too many."""
    worker = worker_of(LATE)
    assert worker.ask(b"a\n") == b"a\n"
    with pytest.raises(WorkerEnded, match="its reply is to no question, or to another one"):
        worker.ask(b"b\n")
    assert worker.ask(b"c\n") == b"c\n"


@pytest.mark.parametrize("waits", [False, True])
def test_a_fork_that_a_test_leaves_open_keeps_no_process_of_tests(tmp_path, waits):
    """Nobody can wait for it any more, and a server that waits for it would never end."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    server = ForkServer()
    left = server.start(script)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(left.wait) if waits else None
        wait_until(lambda: waiting is None or server._lock.locked())
        server.close()
        assert waiting is None or waiting.result(PATIENCE_SECONDS) == -signal.SIGKILL
    left.kill()
    assert left.wait() == left.poll() == -signal.SIGKILL
    for stream in (left.stdin, left.stdout):
        stream.close()
