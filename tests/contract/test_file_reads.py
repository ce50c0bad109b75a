"""Bytes of mapped files are those of the file, however they are copied."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from contract import file_reads
from contract.arrays import Bytes
from contract.file_reads import copy_bytes, file_range, read_pages, remember_file
from tests.needs import machine_lacks

SIZE = 1 << 16


@pytest.fixture
def path(tmp_path) -> Path:
    """A file of random bytes."""
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@pytest.fixture
def view(path) -> Bytes:
    """The whole of the file, whose descriptor is closed."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        remember_file(mapping, path, file.fileno())
    return np.frombuffer(mapping, np.uint8)


def copied(data: Bytes) -> Bytes:
    target = np.zeros(data.shape, np.uint8)
    copy_bytes(target, data)
    return target


def test_every_view_of_a_mapping(path, view):
    """Parts, rows, rows of which a part is copied, and what is no mapping at all."""
    expected = np.frombuffer(path.read_bytes(), np.uint8)
    for data, same in (
        (view, expected),
        (view[100:900], expected[100:900]),
        (view[96:896].reshape(8, 100)[2:5], expected[296:596].reshape(3, 100)),
        (view.reshape(-1, 64)[3:9, 7:20], expected.reshape(-1, 64)[3:9, 7:20]),
        (expected.copy(), expected),
        (view[:0], expected[:0]),
    ):
        assert np.array_equal(copied(data), same)


def test_the_file_is_read_and_not_the_mapping(path, view, monkeypatch):
    """And where that fails or ends early, the mapping is copied."""
    if not hasattr(os, "preadv"):
        machine_lacks("reads at an offset of a file (preadv)")
    offsets, real = [], os.preadv

    def noted(descriptor: int, targets: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return real(descriptor, targets, offset)

    def refused(descriptor: int, targets: list[memoryview], offset: int) -> int:
        raise OSError

    for read in (noted, refused, lambda *_: 3):
        monkeypatch.setattr(file_reads.os, "preadv", read)
        assert np.array_equal(copied(view[500:700]), view[500:700])
    assert offsets == [500]


def test_a_file_stays_open_as_long_as_its_mapping(path):
    """No longer, and its number is not taken for that of another file afterwards."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        remember_file(mapping, path, file.fileno())
    view = np.frombuffer(mapping, np.uint8)[10:20]
    del mapping
    if Path("/proc/self/fd").exists():
        assert str(path.resolve()) in open_files()
    assert copied(view).tobytes() == path.read_bytes()[10:20]
    del view
    assert str(path.resolve()) not in open_files()


def open_files() -> set[str]:
    """What the descriptors of this process lead to, where the system says so."""
    found = set()
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
        # Another thread may close one meanwhile.
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_where_a_view_lies(path, view):
    """Contiguous parts of the mapping have an offset; nothing else has."""
    found = file_range(view[96:896].reshape(8, 100)[2:5])
    assert found is not None
    assert (found.offset, found.nbytes) == (296, 300)
    assert os.fstat(found.descriptor).st_ino == path.stat().st_ino
    assert file_range(view.reshape(-1, 64)[3:9, 7:20]) is None
    assert file_range(view.copy()) is None


def test_forgotten_pages_are_read_again(path, view):
    """Whole pages and parts of pages hold the bytes of the file afterwards."""
    expected = path.read_bytes()
    for part in (view, view[100:200], view[4096:12288], view[5000:5000]):
        found = file_range(part)
        assert found is not None
        found.forget_pages()
        read_pages(part)
        assert view.tobytes() == expected
