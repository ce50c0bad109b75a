"""PoCL's folder of kernels: where its disk is full, LLVM ends the process, not the build."""

from __future__ import annotations

import os
from pathlib import Path

from accel.opencl.device import TIER, Device
from contract.errors import TierUnavailable

ROOM_BYTES = 16 << 20
ROOM_FILES = 64
"""Least that must be free. The program with every op takes 5.4 MB, its object files not counted."""
REMEDY = "free some disk space, or set POCL_CACHE_DIR to another folder"


def check_room(device: Device) -> None:
    """Raise TierUnavailable if PoCL cannot write the kernels of a program."""
    if not device.is_pocl or not hasattr(os, "statvfs"):
        return
    folder = pocl_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    # A file system without a limit of files says that it has none at all.
    few = disk.f_files and disk.f_favail < ROOM_FILES
    if not os.access(existing, os.W_OK):
        problem = "it cannot be written"
    elif free < ROOM_BYTES:
        problem = f"{free / 1e6:.1f} MB are free, of the {ROOM_BYTES / 1e6:.0f} MB that it needs"
    elif few:
        problem = f"{disk.f_favail} files are free, of the {ROOM_FILES} that it needs"
    else:
        return
    raise TierUnavailable(TIER, f"PoCL builds kernels in {folder}: {problem}", REMEDY)


def pocl_folder() -> Path:
    """The folder that PoCL chooses."""
    if named := os.environ.get("POCL_CACHE_DIR"):
        return Path(named).absolute()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches, "pocl", "kcache").absolute()
    home = os.environ.get("HOME")
    return (Path(home, ".cache") if home else Path("/tmp")) / "pocl" / "kcache"
