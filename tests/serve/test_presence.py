"""``zinc-rt ps`` and ``zinc-rt stop``, with servers in processes of their own."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cli import servers_command
from harness.cli.main import main
from harness.serve.presence import Presence, presence_folder, present
from tests.patience import PATIENCE_SECONDS
from tests.serve.http import Reply, posted
from tests.serve.test_process import process

LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "seed": 5}
Zinc = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> Path:
    """No server of the user is seen."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return presence_folder()


@pytest.fixture
def zinc(capsys) -> Zinc:
    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def answering(http: Any) -> tuple[threading.Thread, list[Reply]]:
    """A request that is being answered, and where its answer will be."""
    replies: list[Reply] = []

    def ask() -> None:
        # Of a server that is killed there is no answer.
        with suppress(OSError, HTTPException):
            replies.append(http.post("/v1/completions", LONG))

    thread = threading.Thread(target=ask)
    thread.start()
    while http.get("/health").json["active"] == 0:
        pass
    return thread, replies


def test_a_server_is_listed_while_it_runs(tiny_model_path, tmp_path, zinc, own_folder, hold):
    """With how busy it is; killed, it is gone from the list and so is its file."""
    assert zinc("ps") == (0, "ADDRESS  MODEL  TIER  BUSY  WAITING  UP  PROCESS  STATE\n", "")
    with process(tiny_model_path, tmp_path, hold=hold) as (server, http):
        (listed,) = json.loads(zinc("ps", "--json")[1])
        assert (listed["pid"], listed["tier"], listed["slots"]) == (server.pid, "cpu", 4)
        assert listed["url"] == f"http://127.0.0.1:{http.address[1]}"
        thread, _ = answering(http)
        while present()[0].running == 0:
            pass
        assert "1 of 4" in zinc("ps")[1]
        assert (own_folder.stat().st_mode & 0o077) == 0
        server.kill()
        server.wait()
        thread.join()
        assert len(list(own_folder.iterdir())) == 1
        assert present() == []
        assert list(own_folder.iterdir()) == []


def test_stop_lets_answers_end(tiny_model_path, tmp_path, zinc, hold, monkeypatch):
    """It says how many are left, and the engine goes on once it has said so."""
    note = servers_command.note

    def noted(text: str) -> None:
        note(text)
        if "1 running" in text:
            hold.unlink()

    monkeypatch.setattr(servers_command, "note", noted)
    with process(tiny_model_path, tmp_path, hold=hold) as (server, http):
        thread, replies = answering(http)
        code, _, said = zinc("stop", "--timeout", 5 * PATIENCE_SECONDS)
        thread.join()
        assert (code, server.wait(PATIENCE_SECONDS)) == (0, 0)
        assert "1 running, 0 waiting" in said
        assert "has ended" in said
    assert replies, "the answer was cut"
    assert replies[0].json["usage"]["completion_tokens"] == 200
    assert zinc("stop")[::2] == (2, "error: no server of this user is running\n")


def test_stop_now_cuts_them(tiny_model_path, tmp_path, zinc, hold):
    """After a stop that gave up waiting, which says what to do."""
    with (
        process(tiny_model_path, tmp_path, hold=hold) as (server, http),
        http.connected() as connection,
    ):
        connection.sendall(posted("/v1/completions", LONG))
        while http.get("/health").json["active"] == 0:
            pass
        port = http.address[1]
        code, _, said = zinc("stop", port, "--timeout", 0)
        assert code == 1
        assert f"zinc-rt stop {server.pid} --now" in said
        now = "--now", "--timeout", PATIENCE_SECONDS
        assert zinc("stop", f"http://127.0.0.1:{port}/", *now)[0] == 0
        assert server.wait(PATIENCE_SECONDS) == 130


def test_one_of_several_has_to_be_named(tiny_model_path, tmp_path, zinc):
    with (
        process(tiny_model_path, tmp_path) as (first, _),
        process(tiny_model_path, tmp_path) as (second, _),
    ):
        assert "which of them?" in zinc("stop")[2]
        assert "no server at '1'" in zinc("stop", 1)[2]
        assert zinc("stop", second.pid, "--timeout", PATIENCE_SECONDS)[0] == 0
        assert [server.pid for server in present()] == [first.pid]


def test_another_process_with_its_number_is_left_alone(own_folder, zinc):
    """A file from before a restart names this very process: it is removed, and nobody is ended."""
    own_folder.mkdir(parents=True)
    about = {"url": "http://127.0.0.1:1", "model": "m", "tier": "cpu", "slots": 1}
    began = psutil.Process().create_time()
    for name, content in {
        "old": {"pid": os.getpid(), "started": began - 60, "drain_seconds": 1, **about},
        "other": {"pid": "all", "started": began, "drain_seconds": 1, **about},
        "newer": {"pid": os.getpid(), "unknown": 1},
        "half": "{",
    }.items():
        (own_folder / f"{name}.json").write_text(json.dumps(content))
    assert zinc("stop")[0] == 2
    assert list(own_folder.iterdir()) == []
    right = Presence(os.getpid(), began, "http://127.0.0.1:1", "m", "cpu", 1, 1.0)
    assert right.alive
