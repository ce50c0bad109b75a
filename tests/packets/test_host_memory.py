"""How much memory the machine has left."""

from __future__ import annotations

from pathlib import Path

import psutil

from accel.packets.host_memory import MEMORY_INFORMATION, available_memory


def test_memory_that_can_be_had(tmp_path: Path) -> None:
    """Linux's file names it; without the file psutil does."""
    listed = tmp_path / "meminfo"
    listed.write_text("MemTotal:       24115244 kB\nMemAvailable:   22000001 kB\n")
    assert available_memory(listed) == 22000001 * 1024
    total = psutil.virtual_memory().total
    listed.write_text("MemTotal:       24115244 kB\n")
    for source in (listed, tmp_path / "none", MEMORY_INFORMATION):
        assert 0 < available_memory(source) <= total
