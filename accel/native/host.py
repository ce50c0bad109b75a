"""Facts about this machine: the processors this process may use, the memory, and a name."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
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
    """The smallest quota of this process's control groups, in processors; infinity without one."""
    quotas = [math.inf]
    for root, path in _own_groups(groups, own):
        folders = (root / path, *(root / path).parents)
        quotas += [_quota(folder) for folder in folders if folder.is_relative_to(root)]
    return min(quotas)


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


def _own_groups(groups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Yield each mounted hierarchy that may limit processors, and this process's group in it."""
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        match line.split(":", 2):
            case [_, "", path]:
                yield groups, path.strip("/")
            case [_, controllers, path] if "cpu" in controllers.split(","):
                # Version 1. The folder may have another order, but there is a link.
                for name in (controllers, "cpu"):
                    yield groups / name, path.strip("/")


def _quota(folder: Path) -> float:
    """The quota of one group: the file of version 2, or those of version 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = [(folder / name).read_text(encoding="ascii") for name in names]
            quota, period = map(int, " ".join(words).split())
        except (OSError, ValueError):
            # The file does not exist, or contains "max".
            continue
        if quota > 0 and period > 0:
            return quota / period
    return math.inf
