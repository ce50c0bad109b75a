"""Processes of templates and grammars as forks of one that has imported what their scripts import.

Starting Python and importing Jinja takes 0.09 s of processor time, and tests start hundreds of such
processes. A fork is still a process of its own: it has its own limits, it is killed and waited for
like any other, and it has processed nothing before."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from reference import worker_process
from tests.fork_server import LONGEST, RUNNING

OF_USERS = worker_process.start_process
"""What starts a process outside of tests."""


class ForkServer:
    """Starts forks and waits for them. Threads may share it. The process they are forks of starts
    with the first of them; ``close`` ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, script: Path) -> ForkedProcess:
        """As ``worker_process.start_process``."""
        return ForkedProcess(self, script)

    def ask(self, request: dict[str, object], *files: int) -> int:
        """The answer to a request, which is sent with open files. Once the process was ended nobody
        can wait for its forks: they count as killed, so that what a test left open keeps no process
        of tests. Raises OSError for a new fork then."""
        with self._lock:
            try:
                connection = self._connection()
                socket.send_fds(connection, [json.dumps(request).encode()], files)
                answer = connection.recv(LONGEST)
            except OSError:
                answer = b""
        if not answer and "pid" not in request:
            raise BrokenPipeError("the process that makes forks has ended")
        return int(answer or -signal.SIGKILL)

    def close(self) -> None:
        """End the process, also where it waits for a fork. Forks that are left find their standard
        input at its end."""
        if self._socket is not None and self._process is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._process.kill()
            self._process.wait()
            self._socket.close()

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket, other = socket.socketpair()
            with other:
                script = Path(__file__).with_name("fork_server.py")
                self._process = subprocess.Popen(
                    [sys.executable, "-P", script, str(other.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=True,
                )
        return self._socket


class ForkedProcess:
    """What ``WorkerProcess`` uses of a ``Popen``."""

    def __init__(self, server: ForkServer, script: Path) -> None:
        self.returncode: int | None = None
        self._server = server
        (its_input, to_it), (from_it, its_output) = os.pipe(), os.pipe()
        self.stdin, self.stdout = _unbuffered(to_it, "wb"), _unbuffered(from_it, "rb")
        environment = worker_process.passed_environment()
        request = {"script": str(script), "environment": environment}
        self.pid = server.ask(request, its_input, its_output)
        os.close(its_input)
        os.close(its_output)

    def kill(self) -> None:
        """See ``Popen.kill``. Until a process has been waited for, no other one gets its id."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """See ``Popen.wait``."""
        if self.returncode is None:
            self.returncode = self._server.ask({"pid": self.pid, "options": 0})
        return self.returncode

    def poll(self) -> int | None:
        """See ``Popen.poll``."""
        if self.returncode is None:
            code = self._server.ask({"pid": self.pid, "options": os.WNOHANG})
            self.returncode = None if code == RUNNING else code
        return self.returncode


def _unbuffered(descriptor: int, mode: str) -> IO[Any]:
    return open(descriptor, mode, buffering=0)
