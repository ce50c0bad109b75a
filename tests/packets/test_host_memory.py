"""How much memory the machine has left."""

import psutil
import pytest

from accel.packets.host_memory import MEMORY_INFORMATION, SharedMemory, available_memory
from contract import memory_limits
from contract.errors import OutOfMemory


def test_memory_that_can_be_had(tmp_path, monkeypatch):
    """Linux's file names it; without the file psutil does, or the system, where psutil needs it."""
    listed = tmp_path / "meminfo"
    listed.write_text("MemTotal:       24115244 kB\nMemAvailable:   22000001 kB\n")
    monkeypatch.setattr(memory_limits, "memory_limits", lambda: iter(()))
    assert available_memory(listed) == 22000001 * 1024
    total = psutil.virtual_memory().total
    listed.write_text("MemTotal:       24115244 kB\n")
    for source in (listed, tmp_path / "none", MEMORY_INFORMATION):
        assert 0 < available_memory(source) <= total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: (tmp_path / "none").read_text())
    assert 0 < available_memory(tmp_path / "none") <= total


def test_memory_that_the_system_refuses():
    """Is told by what it was for, and is not counted; smaller memory is still given."""
    memory = SharedMemory(1 << 62)
    with pytest.raises(OutOfMemory, match=r"keys, which the system refuses .*ulimit.*: need"):
        memory.allocate("keys", 1 << 61)
    assert memory.used == 0
    assert memory.allocate("keys", 1 << 10).nbytes == memory.used
