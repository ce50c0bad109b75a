"""Instructions of this machine's processor that an OpenCL compiler may not know it has."""

from __future__ import annotations

from pathlib import Path

CPU_INFORMATION = Path("/proc/cpuinfo")


def has_cpu_flag(flag: str, source: Path = CPU_INFORMATION) -> bool:
    """Whether Linux lists ``flag`` for every core; False where there is no such list."""
    try:
        lines = source.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = [line.partition(":")[2].split() for line in lines if line.startswith("flags")]
    return bool(flags) and all(flag in core for core in flags)
