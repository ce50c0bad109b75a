"""``zinc-rt chat --server``: the local chat, answered over HTTP."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness.cli.main import main
from harness.client import ServerClient, ServerError
from harness.host.options import SessionOptions
from harness.serve.keys import new_key
from harness.serve.model import ModelOptions
from harness.serve.run import Running, ServeOptions, running
from tests.cli.terminal import terminal
from tests.held_steps import hold_steps
from tests.patience import PATIENCE_SECONDS
from tests.serve.tenants import write_tenants

TURNS = b"hello\n\nand then?\n/reset\nhello\n/show\n/system Be brief.\nhello\n/exit\nunread\n"
CUTS = """
import socket

listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
connection, _ = listening.accept()
heard = b""
while not heard.endswith(b"}"):
    heard += connection.recv(65536)
connection.sendall(b'HTTP/1.1 200 OK\\r\\n\\r\\ndata: {"choices": []}\\n\\n')
connection.close()
"""
FLAGS = ("--max-tokens", 5, "--temperature", 0.8, "--seed", 4, "--stop", "zq")


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    session = SessionOptions(tier="cpu", context=1024, slots=2)
    model = ModelOptions(session, "tiny", folder / "digests.json")
    with running(ServeOptions(tiny_model, model, folder / "ledger.sqlite", folder)) as opened:
        yield opened


def test_the_answers_are_those_of_a_local_chat(zinc, server, tiny_model):
    """Turn by turn, with the commands and the flags of a local chat."""
    local = zinc("chat", "--model", tiny_model, *FLAGS, stdin=TURNS)
    remote = zinc("chat", "--server", server.url, *FLAGS, stdin=TURNS)
    assert (remote.code, remote.out) == (local.code, local.out) == (0, local.out)
    assert remote.out.count("\n") >= 4
    assert remote.err.count(f"tiny at {server.url}") == 4
    assert "tier     cpu on " in remote.err


def test_the_server_holds_answers_to_a_format(server, monkeypatch, capsys):
    monkeypatch.setattr("harness.cli.chat.piped_turns", lambda: iter(["hello"]))
    assert main(["chat", "--server", server.url, "-q", "--grammar", 'root ::= "yes" | "no"']) == 0
    assert capsys.readouterr().out in ("yes\n", "no\n")


def test_ctrl_c_stops_the_answer_and_not_the_program(server, monkeypatch):
    """The server hears of it: its slot is free again, though the engine makes no more steps."""
    hold_steps(monkeypatch, 20)
    words = ("chat", "--server", server.url, "--max-tokens", 900, "--seed", 4)
    with terminal(*words) as user:
        user.wait_for(">>> ")
        user.type("hello\n")
        user.wait_behind("hello\r\n")
        os.killpg(user.process.pid, signal.SIGINT)
        user.wait_for("interrupted")
        user.wait_for(">>> ", 2)
        while server.service.model.driver.statistics.running:
            time.sleep(0.01)
        user.type("x" * 2000 + "\n")
        user.wait_for("error: messages")
        user.wait_for("/reset starts")
        user.wait_for(">>> ", 3)
        user.type("\x04")
        assert user.process.wait(PATIENCE_SECONDS) == 0


def test_a_key_is_sent_and_not_shown(zinc, tiny_model, tmp_path, monkeypatch):
    key = new_key()
    tenants = write_tenants(tmp_path, {"alice": key})
    model = ModelOptions(SessionOptions(tier="cpu", context=64), "tiny", tmp_path / "digests.json")
    options = ServeOptions(tiny_model, model, tmp_path / "ledger.sqlite", tmp_path, tenants=tenants)
    with running(options) as keyed:
        words = ("chat", "--server", keyed.url, "--max-tokens", 2)
        assert "key" in zinc(*words, stdin=b"hi\n").err
        assert zinc(*words, "--key", key, stdin=b"hi\n").code == 0
        monkeypatch.setenv("ZINC_RT_KEY", key)
        assert zinc(*words, stdin=b"hi\n").code == 0
        assert key not in repr(ServerClient(keyed.url, key))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "refused"),
        ("127.0.0.1:8080", "not the address of a server"),
        ("http://127.0.0.1:99999", "not the address of a server"),
    ],
)
def test_nobody_there(zinc, url, said):
    result = zinc("chat", "--server", url, stdin=b"hi\n")
    assert result.code != 0
    assert said in result.err
    assert result.err.count("\n") == 1


def test_recordings_are_of_a_local_model(zinc, server, tmp_path):
    words = ("chat", "--server", server.url, "--trace", tmp_path / "trace")
    assert "--trace" in zinc(*words, stdin=b"hi\n").err


def test_a_server_that_cuts_its_answer(tmp_path):
    """A stream without its last line is an error, not a short answer."""
    with subprocess.Popen([sys.executable, "-c", CUTS], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        client = ServerClient(f"http://127.0.0.1:{int(other.stdout.readline())}")
        events = client.stream("/v1/chat/completions", {})
        assert next(events) == {"choices": []}
        with pytest.raises(ServerError, match="cut its answer"):
            next(events)
