"""The processors of this machine: how many this process may keep busy, and their name."""

from __future__ import annotations

import math
import os
import platform
from functools import cache
from pathlib import Path

from contract.control_groups import GROUPS, OWN_GROUPS, own_groups

PROCESSOR_INFORMATION = Path("/proc/cpuinfo")


def processors(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """The number of processors that this process may keep busy, at least 1.

    These are the processors it may run on, but no more than the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, processor_quota(groups, own))))


def processor_quota(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> float:
    """The smallest quota of this process's control groups, in processors; infinity without one."""
    return min([math.inf, *map(_quota, own_groups("cpu", groups, own))])


@cache
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
