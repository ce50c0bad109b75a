"""Functions called in a process of their own, so that native code can die without pytest."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import pytest

from tests.patience import PATIENCE_SECONDS

T = TypeVar("T")
REMEDY = (
    "the library was built for another processor, or uses instructions that this system does not "
    "enable; build it here: remove .venv and run ci/test, which keeps one build per processor"
)


class Child:
    """A process that is started by the first call and again by the first after its death.

    What is called must be importable by name, and its arguments and result must pickle."""

    def __init__(self, name: str) -> None:
        """``name`` says in messages whose code runs in the process."""
        self.name = name
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns in the child.

        An exception there, or the child's death, fails the test and says what happened."""
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((function, arguments))
            done, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            pytest.fail(f"{self.name} {self._end()} in {function.__name__}{arguments!r:.200}")
        except BaseException:
            # An interrupted call must not leave its answer to the next one.
            self.close()
            raise
        if not done:
            pytest.fail(f"{self.name} failed in {function.__name__}:\n{answer}")
        result: T = answer
        return result

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _end(self) -> str:
        """Forget the process, which is ending; how it ended."""
        assert self._process is not None
        assert self._pipe is not None
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        self._process.close()
        self._pipe.close()
        self._process = self._pipe = None
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        cause = signal.Signals(-code)
        remedy = f" ({REMEDY})" if cause == signal.SIGILL else ""
        return f"was ended by {cause.name}{remedy}"


def _serve(pipe: Connection) -> None:
    """The child's end: one answer for every call, until the pipe is closed."""
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
