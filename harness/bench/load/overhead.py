"""Measures the cost of HTTP and server-sent events: a server's engine with and without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from contract.errors import ExecutionError
from contract.types import Request, SamplingParams
from harness.bench.load.servers import ServerSetup
from harness.host.options import SessionOptions
from harness.tiers import TierOptions
from reference.engine import Engine

if TYPE_CHECKING:
    from harness.serve.run import Running

STREAMS = (1, 16)
HTTP_THREADS = ("http", "waitress")
TOKENS = 128
PROMPT = tuple(range(100, 116))
SAMPLING = SamplingParams(temperature=0.8)


@contextmanager
def server_here(setup: ServerSetup, engine_process: bool = False) -> Iterator[Running]:
    """Run a server in this process, so that its engine can also be used without HTTP, unless that
    is in an ``engine_process``. Its limits are those of ``zinc-rt serve``."""
    from harness.cli.serve_command import LISTED, MAX_BIASES
    from harness.serve.model import ModelOptions
    from harness.serve.run import ServeOptions, running

    session = SessionOptions(
        tier=setup.tier,
        tier_options=TierOptions(setup.threads, setup.device),
        context=setup.context,
        slots=setup.slots,
        biases=MAX_BIASES,
        top_log_probabilities=LISTED,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = ModelOptions(session, "bench", Path(folder) / "digests.json")
        options = ServeOptions(
            setup.model,
            model,
            Path(folder) / "ledger.sqlite",
            Path(folder),
            engine_process=engine_process,
        )
        with running(options) as server:
            yield server


def engine_rate(server: Running, streams: int) -> float:
    """Tokens per second of the engine alone, on its own thread."""
    driver = server.service.model.driver

    def work(engine: Engine) -> float:
        began = time.perf_counter()
        for number in range(streams):
            prompt = tuple(token + number for token in PROMPT)
            sampling = replace(SAMPLING, seed=number)
            engine.submit(Request(driver.new_id(), prompt, TOKENS, sampling, ignore_end=True))
        for _ in engine.run():
            pass
        return streams * TOKENS / (time.perf_counter() - began)

    return driver.call(work)


def http_seconds() -> float:
    """Seconds of processor time used so far by this process's threads that handle HTTP."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.name.startswith(HTTP_THREADS)
    )


class Readers:
    """A process that sends requests and discards the answers, so that reading is not counted as the
    server's work. A context manager."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.bench.load.readers", url],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rate(self, streams: int) -> float:
        """Tokens per second of the same requests over HTTP. Raises ExecutionError when one
        fails."""
        return streams * TOKENS / self.seconds([_body(number) for number in range(streams)])

    def seconds(self, bodies: Sequence[Mapping[str, Any]]) -> float:
        """Seconds until all answers to requests with these bodies are read. Raises ExecutionError
        when one fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(bodies) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ExecutionError("the readers ended; their last words are above")
        return float(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


def _body(number: int) -> dict[str, Any]:
    return {
        "prompt": [token + number for token in PROMPT],
        "max_tokens": TOKENS,
        "temperature": SAMPLING.temperature,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
