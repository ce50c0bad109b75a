"""Runs one engine in its own process: ``python -m harness.bench.worker NAME SETUP_JSON PROMPT``.

The process announces its first token, then answers each JSON line of standard input with one:
``{"prompt": ids, "decode_tokens": n}`` or ``{"prompts": [ids, ...], ...}`` with the seconds taken,
``{}`` with the peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.context_manager import ContextManager
from contract.errors import ExecutionError, ZincError
from harness.bench.engines import PeerEngine, Setup, Timing, open_engine
from harness.startup import prepare_process, python_path

if TYPE_CHECKING:
    import subprocess

CLOSE_SECONDS = 30.0
CACHE_VARIABLES = ("XDG_CACHE_HOME", "POCL_CACHE_DIR", "CUDA_CACHE_PATH", "NEO_CACHE_DIR")
"""Variables of the folders in which this runtime on Linux, PoCL, NVIDIA's and Intel's drivers cache
built kernels."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""A variable that would make every start recompile this source tree, which an installed package
(the peer) never does."""


class Worker(ContextManager):
    """The parent's side of a worker. ``first_token_seconds`` counts from the start of the
    process."""

    def __init__(self, name: str, setup: Setup, prompt: str, cache: Path | None = None) -> None:
        """Start the worker. Raises ExecutionError with its output when it could not start.

        ``cache`` replaces every folder of cached kernels."""
        self.name = name
        inherited = {name: value for name, value in os.environ.items() if name != NO_BYTECODE}
        # Imported here, because the child does without it.
        import subprocess

        started = time.perf_counter()
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "harness.bench.worker", name, json.dumps(asdict(setup)), prompt],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, "PYTHONPATH": python_path(), **_cache_variables(cache)},
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.first_token_seconds = time.perf_counter() - started

    def generate(self, prompt: Sequence[int], decode_tokens: int) -> Timing:
        answer = self._ask({"prompt": list(prompt), "decode_tokens": decode_tokens})
        return Timing(**answer)

    def generate_together(self, prompts: Sequence[Sequence[int]], decode_tokens: int) -> Timing:
        together = [list(prompt) for prompt in prompts]
        return Timing(**self._ask({"prompts": together, "decode_tokens": decode_tokens}))

    def peak_resident_bytes(self) -> int:
        """The peak resident memory of the worker so far, in bytes."""
        return int(self._ask({})["peak_resident_bytes"])

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        import subprocess

        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _end(self) -> str:
        """Wait for the process and describe how it ended."""
        code = self._process.wait(CLOSE_SECONDS)
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        # A worker that is gone gives no answer, which is reported when reading.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ExecutionError(f"the {self.name} worker {self._end()}; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ExecutionError(f"{self.name}: {answer['error']}")
        return answer


def _cache_variables(cache: Path | None) -> dict[str, str]:
    return {} if cache is None else {name: str(cache / name) for name in CACHE_VARIABLES}


def serve(name: str, setup: Setup, prompt: str) -> None:
    """The worker's side: write one line for the first token, then one for every line read."""
    prepare_process()
    engine = open_engine(name, setup)
    engine.generate(engine.encode(prompt), 0)
    _say({})
    for line in sys.stdin:
        question = json.loads(line)
        if "prompts" in question:
            assert isinstance(engine, PeerEngine), "a tier serves many in the parent's process"
            _say(asdict(engine.generate_together(question["prompts"], question["decode_tokens"])))
        elif question:
            _say(asdict(engine.generate(question["prompt"], question["decode_tokens"])))
        else:
            _say({"peak_resident_bytes": peak_resident_bytes()})


def peak_resident_bytes() -> int:
    """The peak resident memory of this process in bytes, mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():
        # The resource module's figure includes the parent's memory before exec.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Imported here, because loading a module is counted.
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        serve(sys.argv[1], Setup(**json.loads(sys.argv[2])), sys.argv[3])
    except ZincError as error:
        _say({"error": str(error)})
        sys.exit(error.exit_code)
