"""``zinc-rt serve`` as a process: it says where it listens, and ends as it is told."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from harness.serve.keys import key_digest, new_key
from tests.cli.conftest import command, environment
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.http import Http, posted

ALICE = f'[tenant.alice]\nid = 1\nkeys = ["{key_digest(new_key())}"]\n'
BOB = f'[tenant.bob]\nid = 2\nkeys = ["{key_digest(new_key())}"]\n'


def server_command(model: Path, *words: str, hold: Path | None = None) -> list[str]:
    return command("serve", "--model", model, "--tier", "cpu", *words, hold=hold)


def server_environment(folder: Path) -> Mapping[str, str]:
    return environment(
        XDG_CACHE_HOME=str(folder), XDG_CONFIG_HOME=str(folder), XDG_STATE_HOME=str(folder)
    )


@contextmanager
def process(
    model: Path, folder: Path, *words: str, hold: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], Http]]:
    """A server and requests to it. Its engine makes few steps before the file ``hold`` is gone. A
    test that fails, or hangs, shows what it said."""
    words = ("--drain-seconds", str(5 * PATIENCE_SECONDS), *words)
    line = server_command(model, "--port", "0", "--context", "256", *words, hold=hold)
    with subprocess.Popen(
        line, env=server_environment(folder), stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        try:
            while not (found := re.search(r"listening on (http\S+)", server.stderr.readline())):
                assert server.poll() is None
            yield server, Http(found[1])
        except BaseException:
            server.kill()
            print("the server said:", server.stderr.read(), sep="\n")
            raise
        finally:
            server.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it(tiny_model_path, tmp_path, hold, number, code):
    """SIGTERM lets what runs end and refuses new work, Ctrl-C cuts it, and says so; neither leaves
    a traceback."""
    with process(tiny_model_path, tmp_path, hold=hold) as (server, http):
        assert http.get("/ready").status == 200
        with http.connected() as connection:
            body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "seed": 5}
            connection.sendall(posted("/v1/completions", {**body, "stream": True}))
            heard = connection.recv(65536)
            while b"\n\ndata: " not in heard and b"\ndata: " not in heard:
                heard += connection.recv(65536)
            server.send_signal(number)
            if number == signal.SIGTERM:
                wait_until(lambda: http.get("/health").json["status"] == "draining")
                refused = http.post("/v1/completions", body)
                assert (refused.status, refused.error["code"]) == (503, "draining")
                assert refused.headers["Retry-After"]
                assert http.get("/ready").status == 503
                hold.unlink()
            while part := connection.recv(65536):
                heard += part
        assert server.wait(PATIENCE_SECONDS) == code
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()
    lines = [line for line in heard.split(b"\n") if line.startswith(b"data: ")]
    if number == signal.SIGTERM:
        assert lines[-1] == b"data: [DONE]"
    else:
        error = json.loads(lines[-1].removeprefix(b"data: "))["error"]
        assert error["code"] == "engine_stopped"


def test_a_signal_right_after_it_is_ready_drains(tiny_model_path, tmp_path):
    """What asks for ``/ready`` and then has it stop may do so at once."""
    line = server_command(tiny_model_path, "--port", "0")
    with subprocess.Popen(line, env=server_environment(tmp_path), stderr=subprocess.PIPE) as server:
        try:
            wait_until(lambda: url_of(server) is not None)
            server.send_signal(signal.SIGHUP)
            assert server.wait(PATIENCE_SECONDS) == 0
        finally:
            server.kill()


def url_of(server: subprocess.Popen[Any]) -> str | None:
    """Where a server that is ready listens, which it has not printed yet."""
    assert server.poll() is None
    for one in psutil.Process(server.pid).net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN:
            url = f"http://127.0.0.1:{one.laddr.port}"
            return url if Http(url).get("/ready").status == 200 else None
    return None


LOADING = """
import runpy, sys, time
from harness.serve import run

def slow(*arguments, load=run.open_model):
    loaded = load(*arguments)
    print("loaded", file=sys.stderr, flush=True)
    time.sleep(600)
    return loaded

run.open_model = slow
sys.argv = ["zinc-rt", *sys.argv[1:]]
runpy.run_module("harness", run_name="__main__")
"""


@contextmanager
def script_that_serves(
    script: str, model: Path, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The process of a script that changes the server and runs it, and its standard error."""
    arguments = [sys.executable, "-c", script, *server_command(model, "--port", "0")[3:]]
    named = server_environment(folder)
    with subprocess.Popen(arguments, env=named, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield server, server.stderr
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "SIGTERM ended the server before it was ready\n"),
        (signal.SIGINT, 130, ""),
    ],
)
def test_a_signal_while_it_loads_ends_it(tiny_model_path, tmp_path, number, code, said):
    """Nobody is connected yet, so nothing is waited for."""
    with script_that_serves(LOADING, tiny_model_path, tmp_path) as (server, errors):
        while (line := errors.readline()) != "loaded\n":
            assert line
        server.send_signal(number)
        assert server.wait(PATIENCE_SECONDS) == code
        assert errors.read() == said


CLOSING = """
import runpy, sys, time
from harness.serve.server_models import ServerModels

def stuck(*arguments):
    print("closing", file=sys.stderr, flush=True)
    time.sleep(600)

ServerModels.close = stuck
sys.argv = ["zinc-rt", *sys.argv[1:]]
runpy.run_module("harness", run_name="__main__")
"""


def test_a_third_signal_ends_a_server_that_does_not_stop(tiny_model_path, tmp_path):
    """At once and without a traceback, whatever its threads do."""
    number = signal.SIGINT
    with script_that_serves(CLOSING, tiny_model_path, tmp_path) as (server, errors):
        for said in ("listening on", "closing\n", "closing\n"):
            while said not in (line := errors.readline()):
                assert line
            server.send_signal(number)
        assert server.wait(PATIENCE_SECONDS) == -number
        assert "Traceback" not in errors.read()


def test_sighup_reads_the_tenants_again(tiny_model_path, tmp_path):
    """At once, whether or not anybody asks, and what runs goes on."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(ALICE)
    with process(tiny_model_path, tmp_path, "--tenants", str(tenants)) as (server, http):
        assert server.stderr is not None
        tenants.write_text(ALICE + BOB)
        server.send_signal(signal.SIGHUP)
        while "2 tenants, 2 keys read" not in (line := server.stderr.readline()):
            assert line
        assert http.get("/health").status == 200
        server.terminate()
        assert server.wait(PATIENCE_SECONDS) == 0


def test_it_says_how_to_ask_and_tells_its_supervisor(tiny_model_path, tmp_path, monkeypatch):
    """The curl line, as a shell reads it, is a request that is answered."""
    address = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(address))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.settimeout(PATIENCE_SECONDS)
        supervisor.bind(str(address))
        with process(tiny_model_path, tmp_path) as (server, http):
            assert server.stderr is not None
            page, curl = server.stderr.readline(), server.stderr.readline()
            assert supervisor.recv(64) == b"READY=1"
            url = f"http://127.0.0.1:{http.address[1]}"
            assert page == f"chat page: {url}/\n"
            name, target, flag, header, data, body = shlex.split(curl)
            assert (name, flag, data) == ("curl", "-H", "-d")
            said = dict([header.split(": ")])
            reply = http.send("POST", target.removeprefix(url), body.encode(), said)
            assert reply.status == 200
            server.terminate()
            assert supervisor.recv(64) == b"STOPPING=1"
            assert server.wait(PATIENCE_SECONDS) == 0


def test_a_log_that_cannot_be_written_holds_up_nothing(tiny_model_path, tmp_path):
    """What read it has ended: from the first line on."""
    line = server_command(tiny_model_path, "--port", "0", "--context", "256")
    reading, writing = os.pipe()
    os.close(reading)
    with (
        os.fdopen(writing, "wb", buffering=0) as closed,
        subprocess.Popen(line, env=server_environment(tmp_path), stderr=closed) as server,
    ):
        try:
            wait_until(lambda: url_of(server) is not None)
            url = url_of(server)
            assert url is not None
            for number in range(3):
                asked = {"prompt": "abc", "max_tokens": 2, "seed": number}
                assert Http(url).post("/v1/completions", asked).status == 200
                assert Http(url).get("/nowhere").status == 404
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_SECONDS) == 0
        finally:
            server.kill()
