"""Facts about this machine: the processors this process may use, the memory, and a name."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
PROCESSOR_INFORMATION = Path("/proc/cpuinfo")


def processors(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> int:
    """The number of processors that this process may keep busy, at least 1.

    These are the processors it may run on, but no more than the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, processor_quota(groups, own))))


def processor_quota(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> float:
    """The quota of this process's control group, in processors; infinity without a quota."""
    path = groups / _own_group(own)
    return min(_quota(folder) for folder in (path, *path.parents) if folder.is_relative_to(groups))


def total_memory() -> int:
    """The machine's memory in bytes."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.virtual_memory().total)


def processor_name() -> str:
    """The name that the processor reports."""
    try:
        lines = PROCESSOR_INFORMATION.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _own_group(own: Path) -> str:
    """The path of this process's control group (version 2) below the mounted hierarchy."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
    return paths[0].strip("/") if paths else ""


def _quota(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        # The file does not exist, or contains "max".
        return math.inf
