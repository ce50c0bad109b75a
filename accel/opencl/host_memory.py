"""How much of the machine's memory can be had."""

from __future__ import annotations

from pathlib import Path

MEMORY_INFORMATION = Path("/proc/meminfo")
KIB = 1024


def available_memory(source: Path = MEMORY_INFORMATION) -> int:
    """Bytes a process can take without swapping, as Linux says itself where there is Linux: the
    library that knows every system takes longer to load."""
    try:
        lines = source.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.removesuffix("kB")) * KIB
    import psutil

    return int(psutil.virtual_memory().available)
