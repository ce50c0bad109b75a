"""The process that ``tests/worker_forks.py`` has forks made of.

A request is a JSON object. ``{"script", "environment"}`` comes with two open files, the standard
input and output of a new process that runs the script: the answer is its id. The answer to
``{"pid"}`` is how that process has ended, as ``Popen.returncode``."""

import gc
import importlib
import json
import os
import socket
import sys
import time
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from types import CodeType
from typing import NoReturn

MODULES = ("jinja2.sandbox", "llguidance", "reference.model.template_text", "resource")
"""What the scripts import."""
LONGEST = 1 << 16
"""Most bytes of a request."""
RUNNING = 1 << 16
"""The answer that a process has not ended: no exit code."""


def answer_requests(connection: socket.socket) -> None:
    """Serve until the other side is closed."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, LONGEST, 2)
        if not data:
            return
        request = json.loads(data)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], request["options"])
            answer = os.waitstatus_to_exitcode(status) if pid else RUNNING
        else:
            code = _compiled(request["script"])
            answer = os.fork()
            if not answer:
                connection.close()
                _run(code, request["environment"], *files)
            for descriptor in files:
                os.close(descriptor)
        connection.send(str(answer).encode())


@cache
def _compiled(script: str) -> CodeType:
    return compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)


def _run(code: CodeType, environment: dict[str, str], stdin: int, stdout: int) -> NoReturn:
    """Run a script as Python does."""
    os.setsid()
    for number, descriptor in enumerate((stdin, stdout)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    exec(code, {"__name__": "__main__"})
    sys.exit()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    with closing(socket.socket(fileno=int(sys.argv[1]))) as of_the_tests:
        answer_requests(of_the_tests)
