"""Files of the disk cache: what is not exactly what was written is never used."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from contract import cached_files
from reference.memory.disk import entry as entry_module
from reference.memory.disk.entry import (
    HEADER_BYTES,
    BrokenEntry,
    Bytes,
    Entry,
    EntryKind,
    read_entry,
)
from reference.memory.disk.folder import SECRET, SUBFOLDER, CacheFolder
from reference.memory.disk.names import PageNames
from tests.patience import PROCESS_SECONDS

NBYTES = 300
PLENTY = 1 << 20
SCOPE = ("tenant", 0, "local")


def entry_of(folder: CacheFolder, number: int, kind: EntryKind = EntryKind.PAGE) -> Entry:
    names = PageNames(folder.secret, "a function")
    tokens = np.full(16, number, np.int32).tobytes()
    name = names.page(names.root(SCOPE), tokens)
    return Entry(names.scope(SCOPE), name, tokens, kind, NBYTES)


def payload_of(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, NBYTES, np.uint8)


@pytest.fixture
def folder(tmp_path) -> CacheFolder:
    return CacheFolder(tmp_path, PLENTY)


@pytest.fixture
def written(folder) -> Path:
    """The path of a valid file."""
    entry = entry_of(folder, 1)
    assert folder.write(entry, payload_of(1))
    return folder.path / entry.path


def problem(folder: CacheFolder, number: int = 1) -> str:
    """Why a file is not used, "" where it is."""
    try:
        found = read_entry(folder.path, entry_of(folder, number), folder.secret)
    except BrokenEntry as broken:
        return broken.problem
    assert (found == payload_of(number)).all()
    return ""


def test_a_file_has_what_was_written(folder, written):
    assert problem(folder) == ""
    assert written.stat().st_size == HEADER_BYTES + NBYTES
    assert not folder.write(entry_of(folder, 1), payload_of(1)), "it is there already"
    with pytest.raises(FileNotFoundError):
        problem(folder, 2)


def test_every_flipped_bit_is_found(folder, written):
    """One bit of each byte of the header, of the ids, of the checksum and of the payload."""
    whole = written.read_bytes()
    for index in range(len(whole)):
        flipped = bytearray(whole)
        flipped[index] ^= 1 << index % 8
        written.write_bytes(flipped)
        assert problem(folder), f"byte {index} of {len(whole)} may be wrong"
    written.write_bytes(whole)
    assert problem(folder) == ""


def test_every_other_length_is_found(folder, written):
    whole = written.read_bytes()
    for length in range(len(whole)):
        written.write_bytes(whole[:length])
        assert problem(folder) == "cut"
    written.write_bytes(whole + b"\0")
    assert problem(folder) == "cut"
    written.write_bytes(whole[:-7] + bytes(7))
    assert problem(folder) == "damaged", "blocks that a loss of power left empty"


def test_files_of_others_are_found(folder, written, tmp_path):
    whole = written.read_bytes()
    other = entry_of(folder, 2)
    folder.write(other, payload_of(2))
    written.write_bytes((folder.path / other.path).read_bytes())
    assert problem(folder) == "foreign", "a file of another page"
    written.write_bytes(b"something else that is longer than a header" * 10)
    assert problem(folder) == "foreign"
    strange = CacheFolder(tmp_path / "other folder", PLENTY)
    forged = entry_of(folder, 1)
    (strange.path / forged.scope).mkdir()
    strange.write(forged, payload_of(1))
    written.write_bytes((strange.path / forged.path).read_bytes())
    assert problem(folder) == "damaged", "the same bytes with the secret of another folder"
    written.write_bytes(whole)
    assert problem(folder) == ""


@pytest.mark.parametrize("removed", [("folder",), ("file", "folder"), ("file", "folder") * 2])
def test_a_file_is_written_though_its_scope_is_removed_meanwhile(
    folder, tmp_path, monkeypatch, removed
):
    """Others remove a scope, whose folder or file has just been made, and remove it again."""
    partial_name, replace = cached_files.partial_name, os.replace
    left = list(removed)

    def remove(what: str) -> None:
        if left[:1] == [what]:
            left.pop(0)
            CacheFolder(tmp_path, PLENTY).remove_scope(entry_of(folder, 1).scope)

    def named(target: Path) -> Path:
        remove("folder")
        return partial_name(target)

    def renamed(partial: Path, target: Path) -> None:
        remove("file")
        replace(partial, target)

    monkeypatch.setattr(cached_files, "partial_name", named)
    monkeypatch.setattr(os, "replace", renamed)
    assert folder.write(entry_of(folder, 1), payload_of(1))
    assert problem(folder) == ""
    assert not left


def test_a_file_of_another_version_is_found(folder, written, monkeypatch):
    """Its checksum is right."""
    written.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(entry_module, "VERSION", entry_module.VERSION - 1)
        folder.write(entry_of(folder, 1), payload_of(1))
    assert problem(folder) == "version"


def test_what_is_no_file_stops_nobody(folder, written):
    written.unlink()
    os.mkfifo(written)
    assert problem(folder) == "foreign", "a pipe without a writer"
    written.unlink()
    written.mkdir()
    with pytest.raises((BrokenEntry, OSError)):
        problem(folder)
    written.rmdir()
    written.symlink_to(written)
    with pytest.raises(OSError, match="symbolic links"):
        problem(folder)


def test_a_state_is_no_page(folder, written):
    state = entry_of(folder, 1, EntryKind.STATE)
    (folder.path / state.path).write_bytes(written.read_bytes())
    with pytest.raises(BrokenEntry, match="foreign"):
        read_entry(folder.path, state, folder.secret)


def test_without_the_checksum_a_flipped_bit_would_be_used(folder, written, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(entry_module, "_checksum", lambda *parts: bytes(32))
    written.unlink()
    folder.write(entry_of(folder, 1), payload_of(1))
    flipped = bytearray(written.read_bytes())
    flipped[-1] ^= 1
    written.write_bytes(flipped)
    with pytest.raises(AssertionError):
        problem(folder)


def test_names_say_nothing_without_the_secret(tmp_path):
    one, two = (CacheFolder(tmp_path / name, PLENTY) for name in ("one", "two"))
    assert one.secret != two.secret
    assert entry_of(one, 1).name != entry_of(two, 1).name
    assert entry_of(one, 1).scope != entry_of(two, 1).scope
    assert CacheFolder(tmp_path / "one", PLENTY).secret == one.secret
    mode = (tmp_path / "one" / SUBFOLDER / SECRET).stat().st_mode
    assert not mode & 0o077, "only its owner reads it"


def test_names_depend_on_all_that_bytes_depend_on():
    names = [
        PageNames(secret, function).page(PageNames(secret, function).root(scope), tokens)
        for secret in (bytes(32), bytes([1] * 32))
        for function in ("a", "b")
        for scope in (("tenant", 1, "a"), ("tenant", 1, "b"), ("tenant", 2, "a"), ("group", 1))
        for tokens in (bytes(64), bytes([1] + [0] * 63))
    ]
    assert len(set(names)) == 2 * 2 * 4 * 2


def test_a_cut_secret_is_made_anew(tmp_path):
    folder = CacheFolder(tmp_path, PLENTY)
    folder.write(entry_of(folder, 1), payload_of(1))
    (folder.path / SECRET).write_bytes(folder.secret[:5])
    again = CacheFolder(tmp_path, PLENTY)
    assert len(again.secret) == 32
    assert not again.has(entry_of(again, 1)), "pages under the old secret are not found"


def used(folder: CacheFolder) -> int:
    return sum(file.nbytes for file in folder.files())


@pytest.mark.parametrize("clock", ["right", "once wrong"])
def test_the_folder_is_bounded_and_what_was_not_used_goes_first(clock, tmp_path):
    """Also if a clock was ahead for a while, from which pages have times of the future."""
    size = HEADER_BYTES + NBYTES
    folder = CacheFolder(tmp_path, 8 * size)
    for number in range(8):
        assert folder.write(entry_of(folder, number), payload_of(number))
        ahead = clock == "once wrong" and number == 1
        folder.touch([entry_of(folder, number)], 1_000 + number + ahead * 2 * time.time_ns())
    folder.touch([entry_of(folder, 0), entry_of(folder, 3)], 5_000)
    for number in range(8, 11):
        folder.write(entry_of(folder, number), payload_of(number))
        assert used(folder) <= 8 * size
    assert problem(folder, 0) == problem(folder, 3) == problem(folder, 10) == ""
    assert not folder.has(entry_of(folder, 1))
    assert not folder.write(entry_of(folder, 99)._replace(nbytes=9 * size), payload_of(9))


def test_files_of_others_and_left_overs_count_and_strangers_stay(tmp_path):
    size = HEADER_BYTES + NBYTES
    one, two = (CacheFolder(tmp_path, 40 * size) for _ in range(2))
    stranger = one.path / "notes.txt"
    stranger.write_bytes(bytes(100 * size))
    for number in range(30):
        one.write(entry_of(one, number), payload_of(number))
    left = one.path / f"{entry_of(one, 98).path}.{'0' * 16}.partial"
    left.write_bytes(bytes(size))
    os.utime(left, ns=(1, 1))
    for number in range(30, 60):
        two.write(entry_of(two, number), payload_of(number))
    assert used(two) <= 40 * size
    assert not left.exists(), "what a killed process left is removed as the oldest"
    assert stranger.exists(), "what is not the cache's is not touched"


def test_removing_a_scope_leaves_the_others(folder):
    mine, other = entry_of(folder, 1), entry_of(folder, 2)._replace(scope="f" * 32)
    folder.write(mine, payload_of(1))
    folder.write(other, payload_of(2))
    folder.remove_scope(mine.scope)
    assert not folder.has(mine)
    assert not (folder.path / mine.scope).exists()
    assert folder.has(other)


WRITER = """
import sys
from pathlib import Path
from tests.memory.test_disk_entries import *
folder = CacheFolder(Path(sys.argv[1]), 40 * (HEADER_BYTES + NBYTES))
wrong = 0
for turn in range(3):
    for number in range(60):
        folder.write(entry_of(folder, number), payload_of(number))
        try:
            wrong += problem(folder, (number * 7 + turn) % 60) != ""
        except FileNotFoundError:
            pass
print(wrong, used(folder) <= 2 * 40 * (HEADER_BYTES + NBYTES))
"""


def test_processes_that_write_one_folder_see_whole_files(tmp_path):
    """They make its secret together, write the same names, and evict what others wrote."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(3)
    ]
    results = [process.communicate(timeout=PROCESS_SECONDS)[0] for process in processes]
    assert results == ["0 True\n"] * 3
