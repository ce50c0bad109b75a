"""The library in the cache folder: kept, torn, foreign, not writable, full, and built twice."""

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from accel.native import compile as native_compile
from accel.native import library
from accel.native.build import build_all
from accel.native.compile import Compiler, build_library, build_processor_library, find_compiler
from accel.native.library import processor_words
from accel.native.names import PROCESSOR, Target, library_name, this_target
from accel.native.variants import VARIANTS, machine
from accel.packets.build import BuildError
from contract.errors import ConfigError, TierUnavailable
from tests.needs import need_device
from tests.patience import PROCESS_SECONDS

TARGET = this_target(machine())
FILE = library_name(PROCESSOR, TARGET)
"""Of the smallest library, which takes a fraction of a second to build."""

Built = list[Target]


@pytest.fixture
def built(monkeypatch) -> Built:
    """The builds of a test, which are real."""
    need_device(find_compiler)
    found: Built = []

    def build(target: Target, compiler: Compiler) -> bytes:
        found.append(target)
        return build_processor_library(target, compiler)

    monkeypatch.setattr(native_compile, "build_processor_library", build)
    return found


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch) -> None:
    """Every test loads what it finds."""
    library._open.cache_clear()


def test_a_library_is_built_once(tmp_path, built):
    """The second look finds the first one's file."""
    first = processor_words(TARGET, tmp_path)
    assert processor_words(TARGET, tmp_path) == first
    assert len(built) == 1
    assert (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: data[:100], lambda data: b"", lambda data: b"x" + data],
    ids=["last byte", "begin alone", "empty", "shifted"],
)
def test_a_torn_file_is_built_again(tmp_path, built, damage):
    """It is never loaded."""
    assert callable(damage)
    words = processor_words(TARGET, tmp_path)
    path = tmp_path / FILE
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(whole))
    library._open.cache_clear()
    assert processor_words(TARGET, tmp_path) == words
    assert len(built) == 2
    assert len(path.read_bytes()) == len(whole)


@pytest.mark.parametrize("since", [0, 4_000_000_000], ids=["long ago", "of the future"])
def test_a_file_of_another_build_is_left_alone(since, tmp_path, built, monkeypatch):
    """Other texts of the kernels have a file of their own; of many the oldest go, and the new one
    stays also if the clock says that all others are newer."""
    others = [f"{PROCESSOR}-{number:016x}{TARGET.suffix}" for number in range(20)]
    for age, name in enumerate(others):
        (tmp_path / name).write_bytes(b"another build")
        os.utime(tmp_path / name, (since + age, since + age))
    processor_words(TARGET, tmp_path)
    kept = {path.name for path in tmp_path.glob(f"{PROCESSOR}-*{TARGET.suffix}")}
    assert FILE in kept
    assert len(kept) == library.CACHED_BUILDS
    assert since or kept == {FILE, *others[-library.CACHED_BUILDS + 1 :]}
    assert len(built) == 1


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, built):
    """The library is loaded from a file that is gone afterwards."""
    not_a_folder = tmp_path / "cache"
    not_a_folder.write_bytes(b"a file")
    assert processor_words(TARGET, not_a_folder) == processor_words(TARGET, None)
    assert len(built) == 2
    assert not_a_folder.read_bytes() == b"a file"


def test_a_folder_without_programs_is_done_without(tmp_path, built, monkeypatch):
    """Where the cache may hold no programs (noexec), a copy is loaded; where nothing may, the error
    says what helps."""
    words, load, refused = processor_words(TARGET, tmp_path), ctypes.CDLL, [str(tmp_path)]

    def loaded(path: str) -> object:
        if path.startswith(tuple(refused)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    library._open.cache_clear()
    assert processor_words(TARGET, tmp_path) == words
    refused.append(tempfile.gettempdir())
    library._open.cache_clear()
    with pytest.raises(TierUnavailable, match=r"failed to map .*; set TMPDIR to"):
        processor_words(TARGET, tmp_path)
    assert len(built) == 1


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    """What could not be written whole is removed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert not library._store(tmp_path / FILE, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert library._store(tmp_path / FILE, bytes(5000))


def test_a_full_disk_while_building_is_said(tmp_path, built):
    """With what to do about it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(TierUnavailable, match=r"could not be built: .*TMPDIR"):
            processor_words(TARGET, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_interrupt_while_building_leaves_nothing_behind(tmp_path, monkeypatch, built):
    """The lock is free again, and the next look builds."""
    real = native_compile.build_processor_library

    def interrupt(target: Target, compiler: Compiler) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(native_compile, "build_processor_library", interrupt)
    with pytest.raises(KeyboardInterrupt):
        processor_words(TARGET, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in ([], [f"{FILE}.lock"])
    monkeypatch.setattr(native_compile, "build_processor_library", real)
    processor_words(TARGET, tmp_path)
    assert len(built) == 1


SLOW_COMPILER = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], f"begun {sys.argv[2]}").touch()
time.sleep(20)
pathlib.Path(sys.argv[1], f"ended {sys.argv[2]}").touch()
"""


def test_an_interrupt_ends_the_compilers(tmp_path):
    """Those that run and those that wait, so that Ctrl-C in an installation needs no minute."""
    commands = {
        unit: [sys.executable, "-c", SLOW_COMPILER, str(tmp_path), unit]
        for unit in ("first", "second", "late")
    }

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        native_compile._run_all(commands, tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"begun first", "begun second"}


def test_leavings_of_a_killed_process_are_removed(tmp_path, built):
    """Those of the same library: another one may be under way."""
    stale, other = (tmp_path / f"{name}.x{library.PARTIAL}" for name in (FILE, "another.so"))
    for path in (stale, other):
        path.write_bytes(b"half a library")
    processor_words(TARGET, tmp_path)
    assert not stale.exists()
    assert other.exists()


SCRIPT = """
import sys
from pathlib import Path
from accel.native import compile, library
from accel.native.names import this_target
from accel.native.variants import machine

build = compile.build_processor_library

def counted(target, compiler):
    print("built", flush=True)
    return build(target, compiler)

compile.build_processor_library = counted
print(library.processor_words(this_target(machine()), Path(sys.argv[1])), flush=True)
"""


def test_two_processes_build_once(tmp_path):
    """The second waits for the first and takes its file."""
    need_device(find_compiler)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=PROCESS_SECONDS)[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0][-1] == said[1][-1]
    assert sum(line == "built" for lines in said for line in lines) == 1


def test_no_compiler_is_said_with_the_remedy(tmp_path, monkeypatch):
    """So that ``auto`` can repeat it."""
    monkeypatch.setattr(native_compile, "find_spec", lambda name: None)
    with pytest.raises(TierUnavailable, match=r"no compiler.*; pip install ziglang, or set"):
        processor_words(TARGET, tmp_path)


def test_the_compiler_can_be_named(tmp_path, monkeypatch):
    """A compiler that rejects the text is an error that names the unit and has its words."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such language >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(native_compile.COMPILER_SETTING, str(broken))
    compiler = find_compiler()
    assert compiler == Compiler((str(broken),), is_zig=False)
    variant = next(variant for variant in VARIANTS if variant.machine == TARGET.machine)
    with pytest.raises(BuildError, match=r"building \w+ failed: no such language"):
        build_library(variant, TARGET, compiler, 1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_the_compiler_fills_is_said(tmp_path, monkeypatch, error):
    """As one that is full before, so that ``auto`` takes another tier. The compiler does not say it
    in the user's language."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    broken = tmp_path / "cc"
    words = os.strerror(error)
    said = f'[ "$LC_ALL" = C ] && echo error: IO failure: {words} >&2 || echo voll >&2'
    broken.write_text(f"#!/bin/sh\n{said}\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(native_compile.COMPILER_SETTING, str(broken))
    with pytest.raises(TierUnavailable, match=rf"be built: {words}; .*TMPDIR"):
        processor_words(TARGET, None)


def test_a_folder_with_files_of_others_is_refused(tmp_path):
    """Old libraries go; nothing else is deleted, and they only with nothing else."""
    (tmp_path / "processor-0123456789abcdef.so").write_bytes(b"old")
    (tmp_path / "notes.txt").write_bytes(b"notes of years")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, which is no library"):
        build_all(Target("linux", "x86_64"), tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "processor-0123456789abcdef.so",
    ]
