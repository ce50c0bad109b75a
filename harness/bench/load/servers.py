"""Starts servers as processes: this project's, and the peer's on the same file."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from contract.errors import ConfigError, ExecutionError
from contract.extras import install_command
from harness.bench.engines import PEER, check_peer
from harness.bench.load.clients import ServerTarget
from harness.bench.load.plan import MIX_CONTEXT
from harness.client import ServerClient, ServerError
from harness.serve.keys import key_digest, new_key
from harness.startup import python_path

READY_SECONDS = 120.0
END_SECONDS = 30.0
NAME = "bench"


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """The settings both servers are started with."""

    model: Path
    tier: str
    threads: int
    slots: int
    tenants: int = 1
    context: int = MIX_CONTEXT
    device: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers, with the seconds since its process started and its processor time,
    which is the better measure on a busy machine."""

    target: ServerTarget
    ready_seconds: float
    processor_seconds: float


@contextmanager
def own_server(setup: ServerSetup) -> Iterator[Started]:
    """Run ``zinc-rt serve`` on a free port, with a key per tenant if there are several. Raises
    ExecutionError when it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        keys: list[str | None] = [None]
        words = ["--ledger", str(Path(folder) / "ledger.sqlite")]
        if setup.tenants > 1:
            keys = [new_key() for _ in range(setup.tenants)]
            file = Path(folder) / "tenants.toml"
            file.write_text(_tenants_file([key for key in keys if key is not None]))
            words += ["--tenants", str(file)]
        words += ["--model", str(setup.model.resolve()), "--tier", setup.tier, "--port", "0"]
        words += ["--quiet", "--threads", str(setup.threads), "--slots", str(setup.slots)]
        words += ["--context", str(setup.context), "--device", setup.device]
        began = time.perf_counter()
        with attended("harness", ["serve", *words]) as process:
            assert process.stderr is not None
            output = []
            for line in process.stderr:
                output.append(line)
                if found := re.search(r"listening on (http\S+)", line):
                    client = ServerClient(found[1], keys[0])
                    client.get("/ready")
                    ready = time.perf_counter() - began
                    model = client.get("/v1/models")["data"][0]["id"]
                    target = ServerTarget(found[1], model, tuple(keys))
                    yield Started(target, ready, _processor_seconds(process))
                    return
            raise ExecutionError(f"the server did not start: {''.join(output).strip()}")


@contextmanager
def peer_server(setup: ServerSetup) -> Iterator[Started]:
    """Run ``llama_cpp.server`` on the same file with as many threads. It answers one request at a
    time and is set to let others wait instead of interrupting the running one."""
    check_peer_server()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--model", str(setup.model.resolve()), "--model_alias", NAME, "--host", "127.0.0.1"]
    words += ["--port", str(port), "--n_ctx", str(setup.context), "--interrupt_requests", "False"]
    words += ["--n_threads", str(setup.threads), "--n_threads_batch", str(setup.threads)]
    words += ["--verbose", "False"]
    target = ServerTarget(f"http://127.0.0.1:{port}", NAME)
    began = time.perf_counter()
    with attended("llama_cpp.server", words) as process:
        while time.perf_counter() - began < READY_SECONDS:
            if process.poll() is not None:
                assert process.stderr is not None
                raise ExecutionError(f"{PEER}'s server did not start: {process.stderr.read()}")
            try:
                ServerClient(target.url).get("/v1/models")
            except ServerError:
                time.sleep(0.02)
                continue
            ready = time.perf_counter() - began
            yield Started(target, ready, _processor_seconds(process))
            return
        raise ExecutionError(f"{PEER}'s server does not answer after {READY_SECONDS:.0f} s")


def check_peer_server() -> None:
    """Raise ConfigError when the peer's server is not installed."""
    check_peer()
    for module in ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"--peer: {module} is not installed; run {install_command('peer')}")


def reached(url: str, keys: Sequence[str]) -> ServerTarget:
    """A server that is already running. Raises ServerError when it does not answer."""
    client = ServerClient(url.rstrip("/"), keys[0] if keys else None)
    models = client.get("/v1/models")["data"]
    if not models:
        raise ServerError(f"{url} serves no model")
    return ServerTarget(client.url, models[0]["id"], tuple(keys) or (None,))


def _processor_seconds(process: subprocess.Popen[str]) -> float:
    """The processor seconds of a process and its children."""
    first = psutil.Process(process.pid)
    times = [one.cpu_times() for one in (first, *first.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _tenants_file(keys: Sequence[str]) -> str:
    return "".join(
        f"[tenant.bench{number}]\nid = {number + 1}\nkeys = {json.dumps([key_digest(key)])}\n"
        for number, key in enumerate(keys)
    )


@contextmanager
def attended(module: str, words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a module and ends with the block or with this process, however that is
    killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "harness.bench.load.attended", module, *words],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
