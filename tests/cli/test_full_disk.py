"""Commands that write a file, on a disk that is full: one line, and no part of the new file is
taken for all of it."""

import errno
import os
import sys
from pathlib import Path

import pytest

from accel.amd.tools.trace import Trace
from contract.cached_files import LONGEST_NAME, writing
from tests.full_disk import largest_file
from tests.needs import machine_lacks

COMMANDS = {
    "graph": ("graph", "{model}", "-o"),
    "logits": ("logits", "--tier", "cpu", "--tokens", "1,2,3", "--model", "{model}", "--out"),
    "receipt": (
        *("run", "a", "--raw", "--tier", "cpu", "--max-tokens", "1", "--context", "64"),
        *("--model", "{model}", "--receipt"),
    ),
    "config": ("config", "init", "--config"),
}
ROOM = 64
"""Bytes that fit: fewer than any of the files has."""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder without the files of a home."""
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leaves_all_of_a_file_or_none(zinc, folder, tiny_model, name):
    path = folder / "written"
    words = [word.format(model=tiny_model) for word in COMMANDS[name]]
    assert zinc(*words, path).code == 0
    before = path.read_bytes()
    assert len(before) > ROOM
    for there in ({"written": before}, {}):
        with largest_file(ROOM):
            result = zinc(*words, path)
        assert (result.code, result.err.count("error: ")) == (2, 1), result.err
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == there
        path.unlink(missing_ok=True)


def test_logits_have_room_before_they_are_computed(zinc, folder, tiny_model, monkeypatch):
    """A write to a mapped file that has no room ends the process (SIGBUS)."""
    if sys.platform != "linux":
        machine_lacks("Linux, which alone reserves room on every disk")

    def full(handle: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    path = folder / "logits.npy"
    words = ("logits", "--tier", "cpu", "--tokens", "1,2", "--model", tiny_model, "--out", path)
    result = zinc(*words)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "No space left" in result.err
    assert not os.listdir(folder)


def test_a_record_of_packets_is_whole(folder):
    path = folder / "written"
    path.write_bytes(b"what was there")
    with largest_file(ROOM), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        Trace("none", "none", 0).save(path)
    assert path.read_bytes() == b"what was there"
    assert os.listdir(folder) == [path.name]


def test_what_a_user_names_stays_what_it_is(folder):
    """Links and permissions stay; pipes and devices are written; a long name needs no other."""
    real, link, pipe = (folder / name for name in ("real", "link", "pipe"))
    real.write_bytes(b"old")
    real.chmod(0o600)
    link.symlink_to(real)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    longest = folder / ("n" * 255)
    assert len(longest.name) > LONGEST_NAME
    for path in (link, pipe, longest, Path("/dev/null")):
        with writing(path) as file:
            file.write(b"new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert link.is_symlink()
    assert (real.read_bytes(), real.stat().st_mode & 0o777) == (b"new", 0o600)
    assert longest.read_bytes() == b"new"
