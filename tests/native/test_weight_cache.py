"""Arranged weights in the cache folder: written once, mapped later, and every fault on the way."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accel.native import model_weights, weight_cache
from accel.native.tier import NativeTier
from accel.native.weight_cache import (
    HEADER_BYTES,
    PARTIAL,
    SYNCED,
    UNSYNCED,
    has_entry,
    remove_entries,
    usage,
)
from contract.errors import ModelFileError
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.model_runs import SHORT, Outcome, assert_same, generate
from tests.native.conftest import OpenNative
from tests.needs import machine_lacks
from tests.paths import ROOT

Open = Callable[[], NativeTier]
LIMITS = Limits(1, 32, 2, step_tokens=8, step_rows=1)


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are too small to be stored otherwise."""
    if not weight_cache.CAN_ALLOCATE:
        machine_lacks("way to reserve disk space for a file")
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 1)


@pytest.fixture
def model_path(tiny_model_path: Path, tmp_path: Path) -> Path:
    """A model file of its own, which has not changed for a while."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model_path, path)
    os.utime(path, (1e9, 1e9))
    time.sleep(0.05)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the cache, which does not exist."""
    return tmp_path / "cache" / "weights"


@pytest.fixture
def open_one(open_native: OpenNative, folder: Path) -> Open:
    """Opens a tier that stores its weights in the folder."""
    return lambda: open_native(threads=2, weights=folder)


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every entry that is arranged."""
    found: list[int] = []
    real = model_weights.ModelWeights._fill

    def fill(self: model_weights.ModelWeights, weights: object, target: object) -> bool:
        found.append(target.nbytes)  # type: ignore[attr-defined]
        return real(self, weights, target)  # type: ignore[arg-type]

    monkeypatch.setattr(model_weights.ModelWeights, "_fill", fill)
    return found


def run(path: Path, tier: NativeTier) -> Outcome:
    """What a model computes on a tier."""
    model = open_model(path)
    with model.file:
        return generate(model, tier, SHORT)


@pytest.fixture
def expected(model_path: Path, open_native: OpenNative) -> Outcome:
    """What it computes where nothing is stored."""
    return run(model_path, open_native(threads=2))


def entries(folder: Path) -> list[Path]:
    """Everything in the folder but locks, once what is written in the background is written."""
    deadline = time.monotonic() + 60
    while any(folder.glob(f"*{UNSYNCED}")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


def test_weights_are_arranged_once(
    model_path: Path, open_one: Open, folder: Path, fills: list[int], expected: Outcome
) -> None:
    """The second start and a second model of the same tier map the first one's file."""
    tier = open_one()
    assert not has_entry(folder, model_path)
    assert_same(expected, run(model_path, tier))
    (entry,) = entries(folder)
    assert entry.suffix == SYNCED
    assert has_entry(folder, model_path)
    assert_same(expected, run(model_path, tier))
    assert_same(expected, run(model_path, open_one()))
    assert fills == [entry.stat().st_size - HEADER_BYTES]
    assert entries(folder) == [entry]


def _mapped(path: Path) -> tuple[int, set[str]]:
    """Bytes of a mapped file in this process's page table, and the mappings' permissions."""
    resident, permissions, inside = 0, set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            inside = line.endswith(str(path))
            if inside:
                permissions.add(words[1])
        elif inside and words[0] == "Rss:":
            resident += int(words[1]) * 1024
    return resident, permissions


def test_one_form_of_the_weights_is_in_memory(
    model_path: Path, open_one: Open, folder: Path
) -> None:
    """The stored bytes leave the page table; the arranged ones are mapped read-only."""
    for _ in range(2):
        with open_model(model_path).file as file:
            model = open_model(model_path)
            stored = sum(tensor.nbytes for tensor in file.tensors.values())
            with model.file, ModelRunner(model, open_one(), LIMITS):
                (entry,) = entries(folder)
                assert _mapped(entry)[1] == {"r--s"}
                assert _mapped(model_path)[0] < stored // 2


def cut(path: Path) -> None:
    """The last page is missing."""
    os.truncate(path, path.stat().st_size - 4096)


def extend(path: Path) -> None:
    """Cut, and as long as before."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def empty(path: Path) -> None:
    """Nothing is left."""
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    """One byte of a matrix is another one."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([byte ^ 1]))


def break_header(path: Path) -> None:
    """One bit of the header, under the old time of change."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def crash(path: Path) -> None:
    """The machine restarted before the file was on disk."""
    status = path.stat()
    header = bytearray(path.read_bytes()[:HEADER_BYTES])
    at = header.index(b'"boot": "') + len(b'"boot": "')
    header[at] = ord("0") if header[at] != ord("0") else ord("1")
    text = header[: -weight_cache.DIGEST_BYTES]
    header[-weight_cache.DIGEST_BYTES :] = weight_cache.hashlib.sha256(text).digest()
    with path.open("r+b") as file:
        file.write(header)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    path.rename(path.with_suffix(UNSYNCED))


@pytest.mark.parametrize("damage", [cut, extend, empty, overwrite, break_header, crash])
def test_a_damaged_entry_is_arranged_again(
    model_path: Path,
    open_one: Open,
    folder: Path,
    fills: list[int],
    expected: Outcome,
    damage: Callable[[Path], None],
) -> None:
    """It is replaced, and the next start maps the new one."""
    run(model_path, open_one())
    (entry,) = entries(folder)
    damage(entry)
    assert_same(expected, run(model_path, open_one()))
    assert len(fills) == 2
    assert_same(expected, run(model_path, open_one()))
    assert len(fills) == 2
    assert entries(folder) == [entry]


def test_an_entry_of_another_build_or_file_is_left_alone(
    model_path: Path,
    open_one: Open,
    folder: Path,
    fills: list[int],
    expected: Outcome,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other kernels and a file that changed have entries of their own."""
    monkeypatch.setattr(model_weights, "text_digest", lambda: "another build")
    run(model_path, open_one())
    monkeypatch.undo()
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 1)
    other = entries(folder)
    assert_same(expected, run(model_path, open_one()))
    os.utime(model_path, (1e9 + 1, 1e9 + 1))
    time.sleep(0.05)
    assert_same(expected, run(model_path, open_one()))
    assert len(entries(folder)) == 3
    assert set(other) < set(entries(folder))


def test_a_folder_that_cannot_be_written_is_done_without(
    model_path: Path, open_native: OpenNative, folder: Path, expected: Outcome
) -> None:
    """One line says so."""
    folder.parent.mkdir()
    folder.write_bytes(b"a file")
    tier = open_native(threads=2, weights=folder)
    lines: list[str] = []
    tier._weights.progress = lines.append
    assert_same(expected, run(model_path, tier))
    assert len(lines) == 1
    assert "cannot be stored" in lines[0]
    assert folder.read_bytes() == b"a file"


def test_a_full_disk_leaves_nothing_behind(
    model_path: Path, open_one: Open, folder: Path, expected: Outcome
) -> None:
    """The space is reserved before anything is written; one line says that there is none."""
    tier = open_one()
    lines: list[str] = []
    tier._weights.progress = lines.append
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert_same(expected, run(model_path, tier))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert entries(folder) == []
    assert len(lines) == 1
    assert_same(expected, run(model_path, open_one()))
    assert len(entries(folder)) == 1


def test_a_disk_is_not_filled(
    model_path: Path, open_one: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would leave less room than it takes is not written."""
    monkeypatch.setattr(weight_cache, "FREE_SHARE", 1 << 60)
    run(model_path, open_one())
    assert entries(folder) == []


def test_an_interrupt_leaves_nothing_behind(
    model_path: Path, open_one: Open, open_native: OpenNative, folder: Path, expected: Outcome
) -> None:
    """The same tier goes on, and the next start arranges."""
    tier, idle, seen = open_one(), open_native(threads=2), 0

    def interrupt(nbytes: int) -> None:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise KeyboardInterrupt

    model = open_model(model_path)
    with model.file:
        with pytest.raises(KeyboardInterrupt):
            ModelRunner(model, tier, LIMITS, interrupt)
        ModelRunner(model, idle, LIMITS).close()
    assert seen == 5
    assert entries(folder) == []
    assert tier.allocated_bytes == idle.allocated_bytes
    assert_same(expected, run(model_path, tier))
    assert len(entries(folder)) == 1


def test_a_broken_weight_is_refused_and_not_stored(
    model_path: Path, open_one: Open, folder: Path
) -> None:
    """By the name of its tensor."""
    with open_model(model_path).file as file:
        tensor = next(t for t in file.tensors.values() if t.dtype.name == "q4_k")
        start = file.tensor_bytes(tensor.name).ctypes.data
        base = np.frombuffer(file.shards[0].mapping, np.uint8).ctypes.data
    with model_path.open("r+b") as raw:
        raw.seek(start - base + 144)
        raw.write(b"\xff\x7f")
    time.sleep(0.05)
    model = open_model(model_path)
    with model.file, pytest.raises(ModelFileError, match=f"{tensor.name}.*\n?.*row"):
        ModelRunner(model, open_one(), LIMITS)
    assert entries(folder) == []


SCRIPT = """
import os, signal, sys
from pathlib import Path
from accel.native import model_weights, weight_cache
from accel.native.tier import Choices, NativeTier
from reference.model.open import open_model
from tests.model_runs import SHORT, generate

weight_cache.LEAST_BYTES = 1
fill, how = model_weights.ModelWeights._fill, sys.argv[4]

def noted(self, weights, target):
    print("arranged", flush=True)
    if how == "kill":
        target[: target.nbytes // 2] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    return fill(self, weights, target)

model_weights.ModelWeights._fill = noted
choices = Choices(threads=2, cache=Path(sys.argv[1]), weights=Path(sys.argv[2]))
with NativeTier(choices=choices, progress=print) as tier:
    model = open_model(Path(sys.argv[3]))
    print(generate(model, tier, SHORT)[0], flush=True)
"""


def script(kernel_cache: Path, folder: Path, model_path: Path, how: str = "") -> list[str]:
    """The command of a process that runs the model."""
    return [sys.executable, "-c", SCRIPT, *map(str, (kernel_cache, folder, model_path)), how]


def test_two_processes_arrange_once(
    model_path: Path, kernel_cache: Path, folder: Path, expected: Outcome
) -> None:
    """The second waits for the first and maps its file."""
    command = script(kernel_cache, folder, model_path)
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    lines = [process.communicate(timeout=300)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [found[-1] for found in lines] == [str(expected[0])] * 2
    assert sum(line == "arranged" for found in lines for line in found) == 1
    assert len(entries(folder)) == 1


def test_a_killed_process_leaves_no_entry(
    model_path: Path, kernel_cache: Path, open_one: Open, folder: Path, expected: Outcome
) -> None:
    """What it had written is removed by the next start."""
    command = script(kernel_cache, folder, model_path, "kill")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in entries(folder)] == [PARTIAL]
    assert_same(expected, run(model_path, open_one()))
    assert [path.suffix for path in entries(folder)] == [SYNCED]


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "with the entry"])
def test_a_read_only_file_system(
    model_path: Path,
    kernel_cache: Path,
    open_one: Open,
    folder: Path,
    expected: Outcome,
    filled: bool,
) -> None:
    """An entry is used; without one a line says why none is written."""
    mounted = ["unshare", "--mount", "--map-root-user", "sh", "-c", READ_ONLY, str(folder)]
    folder.mkdir(parents=True)
    if filled:
        run(model_path, open_one())
        entries(folder)
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        machine_lacks("way to mount a folder read-only")
    command = [*mounted, *script(kernel_cache, folder, model_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[-1:] == [str(expected[0])], done.stderr
    assert [("Read-only file system" in line) for line in lines[:-1]] == ([] if filled else [True])


def test_the_folder_is_bounded(
    model_path: Path,
    tmp_path: Path,
    open_one: Open,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries that were used least recently go, the leavings of other processes too."""
    copies = [tmp_path / f"{number}.gguf" for number in range(3)]
    for copy in copies:
        shutil.copyfile(model_path, copy)
    time.sleep(0.05)
    for copy in copies[:2]:
        run(copy, open_one())
    size = max(path.stat().st_size for path in entries(folder))
    assert usage(folder) == (2, 2 * size)
    stale = folder / f"left{PARTIAL}"
    stale.write_bytes(bytes(100))
    os.utime(stale, (1, 1))
    monkeypatch.setattr(weight_cache, "MOST_BYTES", 2 * size)
    run(copies[0], open_one())
    run(copies[2], open_one())
    assert [has_entry(folder, copy) for copy in copies] == [True, False, True]
    assert not stale.exists()
    assert usage(folder) == (2, 2 * size)
    assert len(list(folder.glob("*.lock"))) == 2
    monkeypatch.setattr(weight_cache, "MOST_ENTRIES", 1)
    run(copies[1], open_one())
    assert [has_entry(folder, copy) for copy in copies] == [False, True, False]
    monkeypatch.setattr(weight_cache, "MOST_BYTES", size - 1)
    run(copies[2], open_one())
    assert [has_entry(folder, copy) for copy in copies] == [False, True, False]


def test_entries_of_a_model_are_removed(
    model_path: Path, tmp_path: Path, open_one: Open, folder: Path, expected: Outcome
) -> None:
    """Those of other files stay, and who has one mapped goes on."""
    other = tmp_path / "other.gguf"
    shutil.copyfile(model_path, other)
    time.sleep(0.05)
    tier = open_one()
    run(other, tier)
    model = open_model(model_path)
    with model.file, ModelRunner(model, tier, LIMITS):
        assert len(entries(folder)) == 2
        freed = remove_entries(folder, [model_path, tmp_path / "none"])
        assert usage(folder) == (1, freed)
        assert has_entry(folder, other)
        assert not has_entry(folder, model_path)
    assert remove_entries(folder, [model_path]) == 0
    assert_same(expected, run(model_path, tier))


def test_a_file_that_has_just_changed_is_not_stored(
    model_path: Path, open_one: Open, folder: Path, expected: Outcome
) -> None:
    """It may change again without another time of change."""
    future = time.time() + 1000
    os.utime(model_path, (future, future))
    model = open_model(model_path)
    with model.file:
        now = int(future * 1e9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_cache.time, "time_ns", lambda: now)
            assert_same(expected, generate(model, open_one(), SHORT))
    assert not folder.exists()
