"""Files that a process was writing when it was killed: those that nobody writes any more go."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

from accel.native import plan_export, weight_cache
from accel.native.library import stored_library
from accel.packets.disk_cache import write_entry
from contract.cached_files import ABANDONED_SECONDS, remove_abandoned
from contract.errors import ZincError
from contract.types import LOCAL_TENANT, Tenant
from harness.catalog.store import set_active
from harness.file_digests import cached_digest
from harness.serve import presence
from harness.serve.errors import ApiError
from harness.serve.llama_cpp.slot_files import SlotFolder
from reference.memory.disk.folder import CacheFolder
from reference.model.gguf.writer import write_gguf
from tests.memory.test_disk_entries import NBYTES, entry_of, payload_of
from tests.paths import ROOT

PAGE = np.zeros(64, np.uint8)
Write = Callable[[Path, int], object]
"""Writes file number so many in a folder, as a process does that just began."""


def _digest(folder: Path, number: int) -> None:
    model = folder / f"{number}.model"
    model.write_bytes(bytes(number))
    cached_digest(model, model.stat(), folder / "digests.json", lambda: "digest")


def _weights(folder: Path, number: int) -> None:
    source = folder / "model"
    source.write_bytes(b"x")
    with source.open("rb") as file:
        handles = (file.fileno(),)
        entry = weight_cache.Entry(f"a-{number}", 8, handles, (weight_cache.identity(handles[0]),))
        assert weight_cache.write_entry(folder, entry, lambda data: True) is not None


def _plan(folder: Path, number: int) -> None:
    with plan_export._written(folder / "model.plan") as file:
        file.write(bytes(number))


def _slot(folder: Path, number: int, tenant: Tenant = LOCAL_TENANT) -> None:
    tokens = np.zeros(16, np.int32)
    SlotFolder(folder).write(f"{number}", tenant, "f", [PAGE], None, tokens)


def _page(folder: Path, number: int) -> None:
    cache = CacheFolder(folder, 1 << 20)
    assert cache.write(entry_of(cache, number), payload_of(number))


def _presence(folder: Path, number: int) -> None:
    server = presence.Presence(
        pid=number, started=0.0, url="", model="", tier="", slots=1, drain_seconds=0.0, running=0,
        waiting=0, draining=False,
    )  # fmt: skip
    presence._write(folder / f"{number}-80.json", server)


WRITERS: dict[str, Write] = {
    "digests": _digest, "kernels": lambda folder,
    number: write_entry(folder / f"{number}", b"magic", b"data"), "library": lambda folder,
    number: stored_library(folder / f"{number}.so", lambda: b"data"), "weights": _weights,
    "plan": _plan, "slot": _slot, "slot of a tenant": lambda folder,
    number: _slot(folder, number, Tenant(1, "alice")), "page": _page, "presence": _presence,
    "active model": lambda folder, number: set_active(str(folder / f"{number}"), folder),
    "model": lambda folder, number: write_gguf(folder / "a.gguf", {"general.name": "a"}, {}),
}  # fmt: skip
parts = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The names that complete files had before."""
    names: set[Path] = set()

    def noting(real: Callable[..., None]) -> Callable[..., None]:
        def note(source: str | Path, *rest: str | Path) -> None:
            names.add(Path(source))
            real(source, *rest)

        return note

    for call in ("replace", "rename", "link"):
        monkeypatch.setattr(os, call, noting(getattr(os, call)))
    return names


@parts
def test_what_nobody_writes_any_more_is_removed(write, renamed, tmp_path):
    """Names that the writer itself gave, with an old time and with a new one."""
    write(tmp_path, 1)
    killed = {path for path in renamed if path.suffix in (".partial", ".tmp")}
    assert killed
    for path in killed:
        path.write_bytes(bytes(NBYTES))
        os.utime(path, (1, 1))
    living = {path.with_stem(f"{path.stem[:-1]}{int(path.stem[-1] == '7') + 7}") for path in killed}
    strangers = {tmp_path / "notes", tmp_path / "notes.txt"}
    for path in living | strangers:
        path.write_bytes(bytes(NBYTES))
    for path in strangers:
        os.utime(path, (1, 1))
    write(tmp_path, 2)
    assert not [path for path in killed if path.exists()]
    assert all(path.exists() for path in living | strangers)


@parts
def test_what_is_being_written_stays_whatever_the_time_says(write, monkeypatch, tmp_path):
    """Of two that write in a folder, one has a clock that is hours ahead."""
    there = []

    def meanwhile(real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: str | Path, *rest: str | Path) -> None:
            if not there and Path(source).is_relative_to(tmp_path):
                there.append(False)
                changed = os.stat(source).st_mtime_ns
                os.utime(source, (1, 1))
                write(tmp_path, 2)
                there[0] = Path(source).exists()
                os.utime(source, ns=(changed, changed))
            real(source, *rest)

        return rename

    for call in ("replace", "rename", "link"):
        monkeypatch.setattr(os, call, meanwhile(getattr(os, call)))
    write(tmp_path, 1)
    assert there == [True]


def test_a_writer_of_another_process_is_left_alone_until_it_is_killed(tmp_path):
    path = tmp_path / "a.partial"
    path.write_bytes(b"")
    os.utime(path, (1, 1))
    script = (
        "import sys\nfrom contract.cached_files import being_written\n"
        "with being_written(sys.argv[1]):\n    print(flush=True)\n    sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, cwd=ROOT) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        remove_abandoned(tmp_path)
        assert path.exists()
        writer.kill()
        writer.wait()
    remove_abandoned(tmp_path)
    assert not path.exists()


@parts
def test_a_full_disk_keeps_no_part_of_a_file(write, monkeypatch, tmp_path):
    """A part that nobody completes takes room there for an hour, and a restart begins another."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("replace", "rename", "link"):
        monkeypatch.setattr(os, call, full)
    with suppress(OSError, ZincError, ApiError):
        write(tmp_path, 1)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".partial", ".tmp")]


@pytest.mark.parametrize("name", ["digests", "plan", "slot", "slot of a tenant", "page", "model"])
def test_what_others_write_in_a_folder_that_a_user_names_stays(name, tmp_path):
    """Other programs end the names of their unfinished files alike, downloads for one."""
    WRITERS[name](tmp_path, 1)
    folders = [tmp_path, *filter(Path.is_dir, tmp_path.iterdir())]
    strangers = [
        folder / f"{stem}{suffix}"
        for folder in folders
        for stem in ("film.iso", ".film", "digests.a", ".a.gguf.film", ".model.plan.a", "active.7")
        for suffix in (".partial", ".tmp")
    ]
    for path in strangers:
        path.write_bytes(b"")
        os.utime(path, (1, 1))
    WRITERS[name](tmp_path, 2)
    assert [path for path in strangers if not path.exists()] == []


@pytest.mark.parametrize("name", ["digests", "kernels", "library", "presence"])
def test_a_writer_whose_file_went_goes_on(name, monkeypatch, tmp_path):
    """It was taken for killed; what it would have stored is not there, which is all."""
    replace = os.replace

    def late(source: str | Path, target: str | Path) -> None:
        os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    WRITERS[name](tmp_path, 1)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".json")]


def test_a_slow_writer_is_no_killed_one(tmp_path):
    """Its file changes, however long ago it began."""
    path = tmp_path / "a.partial"
    for age, there in ((ABANDONED_SECONDS / 2, True), (-1e6, True), (2 * ABANDONED_SECONDS, False)):
        path.write_bytes(b"")
        os.utime(path, (1, time.time() - age))
        remove_abandoned(tmp_path)
        assert path.exists() == there
