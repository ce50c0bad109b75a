"""Compiled kernels of a wheel: one archive for each folder, with the bytes of every file."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from accel.kernels.compiled import (
    FOLDERS,
    SUFFIX,
    archive_of,
    archives,
    has_compiled,
    read_compiled,
)
from tests.paths import ROOT

ACCEL = ROOT / "accel"


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of the folders of compiled kernels."""
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
        for path in (ACCEL / name).glob("a*"):
            shutil.copy(path, tmp_path / name / path.name)
    return tmp_path


def test_every_folder_of_compiled_kernels_is_named():
    found = {path.parent.relative_to(ACCEL).as_posix() for path in ACCEL.rglob(f"*{SUFFIX}")}
    assert found == set(FOLDERS)


def test_an_archive_has_the_bytes_of_the_files(package):
    for name in FOLDERS:
        folder = package / name
        files = {path.stem: path.read_bytes() for path in folder.glob(f"*{SUFFIX}")}
        assert files
        with archives(package):
            for path in folder.glob(f"*{SUFFIX}"):
                path.unlink()
            assert {one: read_compiled(folder, one) for one in files} == files
            assert all(has_compiled(folder, one) for one in files)
            assert not has_compiled(folder, "none")
            with pytest.raises(FileNotFoundError, match=r"none\.zrt"):
                read_compiled(folder, "none")
        assert not archive_of(folder).exists()


def test_the_same_files_give_the_same_archive(package):
    found = []
    for _ in range(2):
        with archives(package):
            found.append([archive_of(package / name).read_bytes() for name in FOLDERS])
        os.utime(next((package / FOLDERS[0]).iterdir()), (1, 1))
    assert found[0] == found[1]


def test_a_damaged_archive_is_an_error_of_the_file(tmp_path):
    archive_of(tmp_path / "modules").write_bytes(b"\xfd7zXZ\x00 and nothing of an archive")
    with pytest.raises(OSError, match="damaged"):
        read_compiled(tmp_path / "modules", "add")


def test_without_an_archive_files_are_read(tmp_path):
    for name in FOLDERS:
        with pytest.raises(FileNotFoundError, match="a checkout makes it by `python -m") as missing:
            read_compiled(tmp_path / name, "add")
        builder = str(missing.value).rpartition(" ")[2].rstrip("`")
        assert importlib.util.find_spec(builder) is not None
    with pytest.raises(FileNotFoundError):
        read_compiled(tmp_path, "add")
    (tmp_path / "add.zrt").write_bytes(b"x")
    assert read_compiled(tmp_path, "add") == b"x"


@pytest.mark.long
def test_a_wheel_has_archives_in_place_of_files(tmp_path):
    """Built by the project's own backend, of a copy of the sources without a native library."""
    copy = tmp_path / "sources"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if name.split("/")[0] in ("accel", "contract", "pyproject.toml", "README.md", "LICENSE"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    program = (
        "from accel.native import wheel_backend as backend\n"
        "backend._built = lambda: ('any', '')\n"
        "print(backend.build_wheel('wheels'))"
    )
    (copy / "wheels").mkdir()
    (copy / "harness" / "python").mkdir(parents=True)
    paths = [str(copy), os.environ.get("PYTHONPATH", "")]
    named = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=copy, env=named, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (copy / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        unpacked = sum(info.file_size for info in opened.infolist())
        opened.extractall(tmp_path / "installed")
    assert not [name for name in names if name.endswith(SUFFIX)]
    assert {f"accel/{name}.tar.xz" for name in FOLDERS} <= set(names)
    for name in FOLDERS:
        for path in (ACCEL / name).glob(f"*{SUFFIX}"):
            installed = tmp_path / "installed" / "accel" / name
            assert read_compiled(installed, path.stem) == path.read_bytes()
    assert unpacked < 7 << 20
    assert not list((copy / "accel").rglob("*.tar.xz"))
