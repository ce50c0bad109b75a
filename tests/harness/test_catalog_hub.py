"""Models of the hub, pulled by the real client from a hub on loopback."""

import argparse
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE

from contract.errors import CatalogError
from harness.catalog import find_model, find_pulled, pull, pulled_from_hub, resolve_model
from harness.cli import model_command
from tests.harness.catalog_tools import Recorder, random_bytes, visible_files
from tests.harness.hub_server import COMMIT, Hub, send, send_file, serving_hub, start_of
from tests.paths import ROOT

REPOSITORY = "org/Tiny-GGUF"
NAME = f"hf.co/{REPOSITORY}"
CONTENT = random_bytes(3_000_000)
PIECE = DOWNLOAD_CHUNK_SIZE
PARTS = {f"F32/Tiny-F32-0000{n}-of-00002.gguf": random_bytes(200_000, n) for n in (1, 2)}
SPLIT_FOLDER = f"models/{NAME}/F32--Tiny-F32"


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    """The hub every client in this process and its children talks to, with nobody logged in."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serving_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        server.files[REPOSITORY] = {
            "README.md": b"# Tiny",
            "Tiny-Q4_K_M.gguf": CONTENT,
            "Tiny-Q8_0.gguf": CONTENT[:1000],
            **PARTS,
        }
        yield server


def pulled(spec: str, cache: Path, progress: Recorder | None = None) -> Path:
    return pull(find_model(spec), cache, progress or Recorder())


def test_pull_gives_the_exact_file(hub, tmp_path):
    """The default quant, verified, alone in its folder, and counted byte by byte."""
    progress = Recorder()
    path = pulled(NAME, tmp_path, progress)
    assert path == tmp_path / "models" / NAME / "Tiny-Q4_K_M" / "Tiny-Q4_K_M.gguf"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert list((tmp_path / "partial").iterdir()) == []
    assert progress.jobs == [
        (f"downloading {NAME}", len(CONTENT), "B"),
        (f"verifying {NAME}", len(CONTENT), "B"),
    ]
    assert progress.counts == [len(CONTENT)] * 2
    assert not progress.open


def test_catalogued_file_comes_from_its_commit(hub, tmp_path):
    from harness.catalog import HubFile, ManagedModel, ModelFile

    source = HubFile(REPOSITORY, COMMIT, "Tiny-Q8_0.gguf")
    path = pull(ManagedModel("tiny", "tiny", (ModelFile(source, 1000, ""),)), tmp_path)
    assert path.read_bytes() == CONTENT[:1000]
    assert {path for method, path, _ in hub.requests if method == "GET"} == {
        f"/{REPOSITORY}/resolve/{COMMIT}/Tiny-Q8_0.gguf"
    }


def test_split_model_appears_whole(hub, tmp_path):
    path = pulled(f"{NAME}:f32", tmp_path)
    assert path == tmp_path / SPLIT_FOLDER / next(iter(PARTS))
    for part, content in PARTS.items():
        assert (tmp_path / SPLIT_FOLDER / part).read_bytes() == content
    assert len(visible_files(tmp_path)) == 2


def test_parts_of_a_pull_that_failed_are_kept(hub, tmp_path):
    """One bad part makes nothing visible, and costs the next pull that part only."""
    first, second = PARTS
    hub.body[second] = lambda handler: send_file(handler, bytes(len(PARTS[second])))
    with pytest.raises(CatalogError, match=r"00002.gguf: sha256 is .*; the file was discarded"):
        pulled(f"{NAME}:F32", tmp_path)
    assert visible_files(tmp_path) == []
    del hub.body[second]
    pulled(f"{NAME}:F32", tmp_path)
    assert len(hub.gets(first)) == 1
    assert len(hub.gets(second)) == 2
    assert (tmp_path / SPLIT_FOLDER / second).read_bytes() == PARTS[second]


def test_pulled_model_needs_no_hub(hub, tmp_path):
    """By any name that means it; without a quant, what is pulled is good enough."""
    path = pulled(f"{NAME}:Q8_0", tmp_path)
    hub.requests.clear()
    for spec in (f"{NAME}:q8_0", f"{NAME}/Tiny-Q8_0.gguf", NAME, f"huggingface.co/{REPOSITORY}"):
        assert resolve_model(spec, tmp_path) == path
    assert pulled(f"{NAME}/Tiny-Q8_0.gguf", tmp_path) == path
    assert hub.gets(".gguf") == []
    assert resolve_model(f"{NAME}:Q4_K_M", tmp_path).read_bytes() == CONTENT


def test_broken_transfer_continues_where_it_stopped(hub, tmp_path):
    """From the last piece that arrived whole; no byte is counted twice."""
    content = random_bytes(2 * PIECE + 1_000_000)
    hub.files[REPOSITORY]["Tiny-Q4_K_M.gguf"] = content
    cuts = [PIECE + 1000, 2 * PIECE + 1000]

    def breaking(handler: BaseHTTPRequestHandler) -> None:
        send_file(handler, content, cuts.pop(0) if cuts else None)

    hub.body["Tiny-Q4_K_M.gguf"] = breaking
    progress = Recorder()
    assert pulled(NAME, tmp_path, progress).read_bytes() == content
    assert hub.gets("Q4_K_M.gguf") == [None, f"bytes={PIECE}-", f"bytes={2 * PIECE}-"]
    assert progress.counts[0] == len(content)


def test_redirects_are_followed(hub, tmp_path):
    """To where the hub keeps a file, whose server does not know how to continue one."""
    content = random_bytes(PIECE + 1_000_000)
    hub.files["org/moved"] = {"moved/Tiny-Q8_0.gguf": content}
    asked = []

    def whole(handler: BaseHTTPRequestHandler) -> None:
        asked.append(start_of(handler))
        if len(asked) == 1:
            send_file(handler, content, PIECE + 1000)
        else:
            send(handler, content)

    hub.body["moved/Tiny-Q8_0.gguf"] = whole
    assert pulled("hf.co/org/moved", tmp_path).read_bytes() == content
    assert asked == [0, PIECE]


@pytest.mark.parametrize(
    "target", ["http://192.0.2.1/x", "http://hub.test/x", "http://localhost.evil.test/x"]
)
def test_redirect_without_tls_is_refused(hub, tmp_path, target):
    hub.body["Tiny-Q4_K_M.gguf"] = lambda handler: send(handler, b"", 302, Location=target)
    with pytest.raises(CatalogError, match="refused: only https is used"):
        pulled(NAME, tmp_path)
    assert visible_files(tmp_path) == list((tmp_path / "partial").iterdir()) == []


@pytest.mark.parametrize("endpoint", ["http://hub.test", "ftp://127.0.0.1", "hub.test", "//x"])
def test_endpoint_without_tls_is_refused(tmp_path, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(CatalogError, match=r"HF_ENDPOINT is .*: only https is used"):
        pulled(NAME, tmp_path)


def test_wrong_bytes_leave_nothing(hub, tmp_path):
    hub.digests["Tiny-Q4_K_M.gguf"] = "0" * 64
    with pytest.raises(CatalogError, match=f"expected {'0' * 64}; the file was discarded"):
        pulled(NAME, tmp_path)
    assert visible_files(tmp_path) == list((tmp_path / "partial").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_refuses_is_not_taken_for_the_network(hub, tmp_path, monkeypatch, number):
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(CatalogError, match=f"partial/.*: {os.strerror(number)}$"):
        pulled(NAME, tmp_path)


def test_gated_repository_asks_for_its_terms(hub, tmp_path, monkeypatch):
    hub.gated[REPOSITORY] = "hf_good"
    with pytest.raises(CatalogError, match=r"is gated: accept its terms at https.*HF_TOKEN"):
        pulled(NAME, tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert pulled(NAME, tmp_path).read_bytes() == CONTENT
    assert hub.tokens == {None, "Bearer hf_good"}


@pytest.mark.parametrize(
    ("repository", "status", "message"),
    [
        ("org/none", None, "hf.co/org/none: no such repository, or a private one: check the name"),
        (REPOSITORY, 401, "no such repository, or a private one"),
        (REPOSITORY, 403, "403 Forbidden.*check the connection and pull again"),
        (REPOSITORY, 404, "404.*pull again"),
        (REPOSITORY, 500, "500.*pull again"),
        ("org/a--b", None, "hf.co/org/a--b: .*a--b"),
    ],
)
def test_refusals_say_what_to_do(hub, tmp_path, repository, status, message):
    if status is not None:
        hub.status[repository] = status
    with pytest.raises(CatalogError, match=message) as caught:
        pulled(f"hf.co/{repository}", tmp_path)
    assert "\n" not in str(caught.value)


def test_file_that_went_away(hub, tmp_path):
    """Between the listing and the download."""
    model = find_model(NAME)
    del hub.files[REPOSITORY]["Tiny-Q4_K_M.gguf"]
    with pytest.raises(CatalogError, match=r"Entry Not Found|404"):
        pull(model, tmp_path)


def test_nobody_there(tmp_path, monkeypatch):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(CatalogError, match=r"refused.*; check the connection and pull again"):
            pulled(NAME, tmp_path)


def test_offline_says_so_and_what_is_pulled_still_runs(hub, tmp_path):
    """In a process of its own: the library reads HF_HUB_OFFLINE when it is imported."""
    path = pulled(f"{NAME}:Q8_0", tmp_path)
    hub.requests.clear()
    command = [sys.executable, "-m", "harness", "model", "pull", "--cache-dir", str(tmp_path)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, f"{NAME}:Q4_K_M"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr == (
        f"error: {NAME}: HF_HUB_OFFLINE is set; unset it to pull, or name a GGUF file\n"
    )
    script = (
        "import pathlib, sys; from harness.catalog import resolve_model;"
        f"print(resolve_model({NAME!r}, pathlib.Path({str(tmp_path)!r})));"
        "assert 'huggingface_hub' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == (f"{path}\n", "")
    assert hub.requests == []


def command(cache: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    model_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["model", *words, "--cache-dir", str(cache)])
    code: int = args.func(args)
    return code


def test_model_commands_take_names_of_the_hub(hub, tmp_path, capsys):
    assert command(tmp_path, "use", NAME) == 0
    assert capsys.readouterr().out == f"using {NAME}; it is pulled when first needed\n"
    for quant in ("Q4_K_M", "F32"):
        command(tmp_path, "pull", f"{NAME}:{quant}")
    capsys.readouterr()
    command(tmp_path, "list")
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split() for row in rows] == [
        [f"{NAME}:F32", "400", "kB", "installed"],
        [f"{NAME}:Q4_K_M", "3", "MB", "installed,", "active"],
    ]
    command(tmp_path, "active", "--json")
    assert json.loads(capsys.readouterr().out)["path"] == str(resolve_model(None, tmp_path))
    command(tmp_path, "rm", f"{NAME}:f32")
    assert capsys.readouterr().out == f"removed {NAME}:f32: 400 kB freed\n"
    assert [model.id for model in pulled_from_hub(tmp_path)] == [f"{NAME}:Q4_K_M"]
    command(tmp_path, "rm", NAME)
    assert find_pulled(NAME, tmp_path) is None
    with pytest.raises(CatalogError, match="nothing to remove"):
        command(tmp_path, "rm", NAME)


def test_missing_part_is_pulled_again(hub, tmp_path):
    path = pulled(f"{NAME}:F32", tmp_path)
    second = tmp_path / SPLIT_FOLDER / list(PARTS)[1]
    second.unlink()
    (second.parent / "notes.txt").write_text("notes of years")
    assert find_pulled(f"{NAME}:F32", tmp_path) is None
    assert resolve_model(f"{NAME}:F32", tmp_path) == path
    assert second.read_bytes() == PARTS[list(PARTS)[1]]
    assert (second.parent / "notes.txt").read_text() == "notes of years", "what others put there"
