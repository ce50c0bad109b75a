"""The limits on the memory of this process: those of its control groups, and its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from contract.control_groups import GROUPS, OWN_GROUPS, own_groups

OWN_STATUS = Path("/proc/self/status")
GROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files with a limit of a control group and with its usage, and how the names of ``memory.stat``
begin. Above ``memory.high`` the system makes a process wait."""
CACHED = ("active_file", "inactive_file")
PRIVATE = ("VmData",)
ADDRESSED = ("VmData", "VmStk", "VmExe", "VmLib")
"""The sizes that count for RLIMIT_DATA, and for RLIMIT_AS without mapped files: the weights in a
mapped file are part of a plan, so what they take is available to it."""
KIB = 1024


class MemoryLimit(NamedTuple):
    """A limit in bytes, and the bytes it leaves."""

    most: int
    left: int


def memory_limits(
    groups: Path = GROUPS, own: Path = OWN_GROUPS, status: Path = OWN_STATUS
) -> Iterator[MemoryLimit]:
    """Yield every limit on the memory of this process."""
    for group in own_groups("memory", groups, own):
        yield from _group_limits(group)
    yield from _process_limits(status)


def within_limits(available: int) -> int:
    """How much of the machine's ``available`` memory this process can take."""
    return min([available, *(limit.left for limit in memory_limits())])


def most_memory(total: int) -> int:
    """How much of the machine's ``total`` memory this process can have in all."""
    return min([total, *(limit.most for limit in memory_limits())])


def _group_limits(group: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of one group. Cached file pages are left, since the system drops them."""
    for limit, usage, prefix in GROUP_FILES:
        # The files do not exist, or contain "max".
        with suppress(OSError, ValueError):
            most, used = (
                int((group / name).read_text(encoding="ascii")) for name in (limit, usage)
            )
            lines = (group / "memory.stat").read_text("ascii").splitlines()
            stat = dict(line.split() for line in lines)
            cached = sum(int(stat.get(prefix + name, 0)) for name in CACHED)
            yield MemoryLimit(most, max(0, most - used + cached))


def _process_limits(status: Path) -> Iterator[MemoryLimit]:
    try:
        import resource
    except ImportError:  # Windows has none.
        return
    for kind, names in ((resource.RLIMIT_DATA, PRIVATE), (resource.RLIMIT_AS, ADDRESSED)):
        most = resource.getrlimit(kind)[0]
        if most == resource.RLIM_INFINITY:
            continue
        with suppress(OSError, ValueError, KeyError):
            lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
            sizes = dict(line.split(":", 1) for line in lines)
            used = sum(int(sizes[name].removesuffix("kB")) for name in names) * KIB
            yield MemoryLimit(most, max(0, most - used))
