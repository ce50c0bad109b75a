"""How much memory the machine has left."""

import psutil
import pytest

from accel.packets.host_memory import MEMORY_INFORMATION, SharedMemory, available_memory
from contract.errors import OutOfMemory


def test_memory_that_can_be_had(tmp_path, monkeypatch):
    """Linux's file names it; without the file psutil does, or the system, where psutil needs it."""
    listed = tmp_path / "meminfo"
    listed.write_text("MemTotal:       24115244 kB\nMemAvailable:   22000001 kB\n")
    assert available_memory(listed, tmp_path / "none") == 22000001 * 1024
    total = psutil.virtual_memory().total
    listed.write_text("MemTotal:       24115244 kB\n")
    for source in (listed, tmp_path / "none", MEMORY_INFORMATION):
        assert 0 < available_memory(source) <= total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: (tmp_path / "none").read_text())
    assert 0 < available_memory(tmp_path / "none", tmp_path / "none") <= total


@pytest.mark.parametrize(("line", "folder", "files", "caches"), [
    ("0::/box/run", "", ("memory.max", "memory.current"), ("active", "inactive")),
    ("4:cpu,memory:/box/run", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"),
     ("total_active", "total_inactive")),
])  # fmt: skip
def test_limits_of_control_groups(tmp_path, line, folder, files, caches):
    """The tightest of a group and those it is in; cached pages of files are not lost to it."""
    listed, groups = tmp_path / "meminfo", tmp_path / "cgroup"
    listed.write_text("MemAvailable: 4000 kB\n")
    groups.write_text(f"3:pids:/elsewhere\n{line}\n")

    def limit(group: str, most: str, used: int, cached: int) -> None:
        inside = tmp_path / "mounted" / folder / group
        inside.mkdir(parents=True, exist_ok=True)
        for name, text in zip(files, (most, str(used)), strict=True):
            (inside / name).write_text(f"{text}\n")
        parts = zip(caches, (cached, 3), strict=True)
        (inside / "memory.stat").write_text("".join(f"{n}_file {b}\n" for n, b in parts))

    def found() -> int:
        return available_memory(listed, groups, tmp_path / "mounted")

    assert found() == 4000 * 1024
    limit("box/run", "max", 5000, 0)
    assert found() == 4000 * 1024
    limit("box/run", "9000", 5000, 700)
    assert found() == 4000 + 700 + 3
    limit("box", "8000", 7900, 0)
    assert found() == 103
    limit("box", "8000", 9900, 0)
    assert found() == 0
    (tmp_path / "mounted" / folder / "box" / "memory.stat").unlink()
    assert found() == 4000 + 700 + 3


def test_memory_that_the_system_refuses():
    """Is told by what it was for, and is not counted; smaller memory is still given."""
    memory = SharedMemory(1 << 62)
    with pytest.raises(OutOfMemory, match=r"keys, which the system refuses .*ulimit.*: need"):
        memory.allocate("keys", 1 << 61)
    assert memory.used == 0
    assert memory.allocate("keys", 1 << 10).nbytes == memory.used
