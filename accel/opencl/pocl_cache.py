"""PoCL's folder of kernels: where its disk is full, LLVM ends the process, not the build."""

from __future__ import annotations

import os
from pathlib import Path

from accel.opencl.device import Device
from accel.opencl.driver import TIER
from contract.errors import TierUnavailable, system_words

ROOM_BYTES = 16 << 20
ROOM_FILES = 64
"""Least that must be free. The program with every op takes 5.4 MB, its object files not counted."""
REMEDY = "free some disk space, or set POCL_CACHE_DIR to another folder"


def check_room(device: Device) -> None:
    """Raise TierUnavailable if PoCL cannot write the kernels of a program."""
    if not device.is_pocl or not hasattr(os, "statvfs"):
        return
    folder = pocl_folder()
    if problem := _problem_of(folder):
        raise TierUnavailable(TIER, f"PoCL builds kernels in {folder}: {problem}", REMEDY)


def _problem_of(folder: Path) -> str:
    """Why PoCL cannot write to its folder, which it makes as this does; empty if it can."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        disk = os.statvfs(folder)
    except OSError as error:
        return system_words(error)
    free = disk.f_bavail * disk.f_frsize
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it cannot be written"
    # A file system without a limit of bytes or files says that it has none at all.
    if disk.f_blocks and free < ROOM_BYTES:
        return f"{free / 1e6:.1f} MB are free, of the {ROOM_BYTES / 1e6:.0f} MB that it needs"
    if disk.f_files and disk.f_favail < ROOM_FILES:
        return f"{disk.f_favail} files are free, of the {ROOM_FILES} that it needs"
    return ""


def pocl_folder() -> Path:
    """The folder that PoCL chooses."""
    if named := os.environ.get("POCL_CACHE_DIR"):
        return Path(named).absolute()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches, "pocl", "kcache").absolute()
    home = os.environ.get("HOME")
    return (Path(home, ".cache") if home else Path("/tmp")) / "pocl" / "kcache"
