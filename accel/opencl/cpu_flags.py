"""The instruction sets of this machine's processor."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

CPU_INFORMATION = Path("/proc/cpuinfo")
FLAG_FIELDS = ("flags", "Features")
"""Names of the list of instruction sets in Linux, on x86 and on ARM."""
DIGEST_CHARACTERS = 16


@cache
def cpu_flags(source: Path = CPU_INFORMATION) -> frozenset[str]:
    """The instruction sets that Linux lists for all cores; empty without such a list."""
    try:
        lines = source.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    fields = (line.partition(":") for line in lines)
    cores = [frozenset(value.split()) for name, _, value in fields if name.strip() in FLAG_FIELDS]
    return frozenset.intersection(*cores) if cores else frozenset()


def processor_key(source: Path = CPU_INFORMATION) -> str:
    """Hexadecimal digits that identify the architecture and the instruction sets."""
    described = " ".join((platform.machine(), *sorted(cpu_flags(source))))
    return hashlib.sha256(described.encode()).hexdigest()[:DIGEST_CHARACTERS]
