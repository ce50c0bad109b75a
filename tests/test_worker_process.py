"""Threads share a child process: each gets the answer to its own question, whatever the others
ask."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from reference import worker_process
from reference.worker_process import WorkerEnded, WorkerProcess
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.worker_forks import OF_USERS

ECHO = """\
import os, sys
for line in sys.stdin.buffer:
    if line == b"end\\n":
        os._exit(7)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""
PAIRS = """\
import sys
while True:
    pair = [sys.stdin.buffer.readline() for _ in range(2)]
    sys.stdout.buffer.write(b"".join(pair))
    sys.stdout.buffer.flush()
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


def asked_in_order(
    worker: WorkerProcess, pool: ThreadPoolExecutor, lines: list[bytes]
) -> list[object]:
    """Questions of a thread each, which all wait behind the first."""
    asked: list[object] = []
    for count, line in enumerate(lines, 1):
        asked.append(pool.submit(worker.ask, line))
        wait_until(lambda count=count: len(worker._turns) == count)
    return asked


def test_each_thread_gets_its_own_answer(worker_of):
    """Of questions that a pipe holds many of, and of ones that it does not hold."""
    worker = worker_of(ECHO)
    sizes = (1, 40_000, 10, 200_000, 3_000)

    def ask(thread: int) -> list[bool]:
        lines = [b"%d %d %b\n" % (thread, n, b"x" * sizes[n % 5]) for n in range(20)]
        return [worker.ask(line) == line for line in lines]

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(all(right) for right in pool.map(ask, range(THREADS)))


def test_a_question_is_sent_while_another_is_answered(worker_of):
    """The child answers when it has two."""
    worker, lines = worker_of(PAIRS), [b"%d\n" % n for n in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(worker.ask, lines)) == lines


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_question_that_ends_the_child_fails_alone(worker_of, size):
    """Those that were sent behind it are asked again."""
    worker = worker_of(ECHO)
    lines = [b"a" * size + b"\n", b"end\n", b"b" * size + b"\n", b"end\n", b"c\n"]
    with ThreadPoolExecutor(THREADS) as pool:
        with held(worker):
            asked = asked_in_order(worker, pool, lines)
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
        asked = asked_in_order(worker, pool, [b"a\n", b"b\n", b"c\n"])
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(WorkerEnded, match="was killed"):
            asked[0].result()
        assert [one.result() for one in asked[1:]] == [b"b\n", b"c\n"]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_an_interrupted_question_leaves_its_answer_to_nobody(worker_of, others):
    """Ctrl-C ends a wait for an answer, or for the turn, in the main thread."""
    worker = worker_of(ECHO)
    lines = [b"%d\n" % n for n in range(others)]
    with ThreadPoolExecutor(THREADS) as pool:
        with held(worker):
            asked = asked_in_order(worker, pool, lines)

            def interrupt(waiting: int) -> None:
                wait_until(lambda: len(worker._turns) == others + 1)
                signal.pthread_kill(waiting, signal.SIGINT)

            pool.submit(interrupt, threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                worker.ask(b"interrupted\n")
            asked.append(pool.submit(worker.ask, b"later\n"))
        assert [one.result() for one in asked] == [*lines, b"later\n"]
