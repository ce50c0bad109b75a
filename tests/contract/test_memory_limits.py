"""How much memory the control groups and the limits of a process leave."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import psutil
import pytest

from accel.packets.host_memory import available_memory
from contract import memory_limits
from contract.memory_limits import MemoryLimit, most_memory, within_limits
from reference.cpu.prepared import EXPERT_MEMORY_SHARE, expert_memory_limit
from reference.cpu.tier import CpuTier
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS
from tests.structure.source_tree import python_files, relative

ASK_FOR_MEMORY = {
    "accel/packets/host_memory.py", "harness/bench/machine.py", "reference/cpu/prepared.py",
    "reference/cpu/tier.py",
}  # fmt: skip
"""Files that take the machine's memory from the library, and not through ``available_memory``."""
ASK_FOR_PROCESSORS = {"accel/opencl/driver.py", "contract/processors.py"}
"""Files that count all processors, not those that this process may keep busy."""
GIB = 1 << 30
LIMITED = """
import json, resource, sys
from accel.packets.host_memory import available_memory
from reference.cpu.tier import CpuTier
kind, room = getattr(resource, sys.argv[1]), int(sys.argv[2])
before = available_memory()
resource.setrlimit(kind, (room, room))
memory, tier = available_memory(), CpuTier()
print(json.dumps([before, memory, tier.available_bytes]))
"""


@pytest.mark.parametrize(("line", "folder", "files", "prefix"), [
    ("0::/box/run", "", ("memory.max", "memory.current"), ""),
    ("0::/box/run", "", ("memory.high", "memory.current"), ""),
    ("4:cpu,memory:/box/run", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"),
     "total_"),
])  # fmt: skip
def test_limits_of_control_groups(tmp_path, line, folder, files, prefix):
    """The tightest of a group and those it is in; cached pages of files are not lost to it."""
    own, groups = tmp_path / "own", tmp_path / "mounted"
    own.write_text(f"3:pids:/elsewhere\n{line}\n")

    def limit(group: str, most: str, used: int, cached: int) -> None:
        inside = groups / folder / group
        inside.mkdir(parents=True, exist_ok=True)
        for name, text in zip(files, (most, str(used)), strict=True):
            (inside / name).write_text(f"{text}\n")
        parts = (f"{prefix}active_file {cached}\n", f"{prefix}inactive_file 3\n")
        (inside / "memory.stat").write_text("".join(parts))

    def found() -> list[MemoryLimit]:
        return list(memory_limits.memory_limits(groups, own, tmp_path / "none"))

    assert found() == []
    limit("box/run", "max", 5000, 0)
    assert found() == []
    limit("box/run", "9000", 5000, 700)
    assert found() == [(9000, 4000 + 700 + 3)]
    limit("box", "8000", 7900, 0)
    assert found() == [(9000, 4703), (8000, 103)]
    limit("box", "8000", 9900, 0)
    assert found() == [(9000, 4703), (8000, 0)]
    (groups / folder / "box" / "memory.stat").unlink()
    assert found() == [(9000, 4703)]


def test_every_plan_keeps_within_the_limits(monkeypatch):
    """Of every tier that uses the host's memory."""
    total = psutil.virtual_memory().total
    monkeypatch.setattr(memory_limits, "memory_limits", lambda: iter(()))
    assert most_memory(total) == within_limits(total) == total
    limits = [MemoryLimit(total, 1 << 29), MemoryLimit(GIB, 1 << 30)]
    monkeypatch.setattr(memory_limits, "memory_limits", lambda: iter(limits))
    assert most_memory(total) == GIB
    assert expert_memory_limit() == GIB // EXPERT_MEMORY_SHARE
    assert available_memory() == CpuTier().available_bytes == 1 << 29


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process(kind):
    """``ulimit -v`` and ``ulimit -d``: what a process has already is not left to it."""
    words = [sys.executable, "-c", LIMITED, kind, str(2 * GIB)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_SECONDS)
    assert done.returncode == 0, done.stderr
    before, *after = json.loads(done.stdout)
    assert all(0 < one < min(before, 2 * GIB) for one in after)


def test_what_has_no_status_has_no_limit_of_its_own(tmp_path):
    """Nothing tells what is used."""
    (tmp_path / "status").write_text("VmSize: 12 kB\n")
    for status in (tmp_path / "status", tmp_path / "none"):
        assert list(memory_limits.memory_limits(tmp_path, tmp_path / "own", status)) == []


def files_that_say(name: str) -> set[str]:
    """The product's files in which an attribute has the name. Only those are parsed whose text has
    it: trees of all files, which ``source_tree`` keeps, are 0.4 GB."""
    texts = {path: path.read_text(encoding="utf-8") for path in python_files()}
    return {
        relative(path)
        for path, text in texts.items()
        if name in text and not path.is_relative_to(ROOT / "tests")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == name
    }


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("virtual_memory", ASK_FOR_MEMORY),
        ("cpu_count", ASK_FOR_PROCESSORS),
        ("sched_getaffinity", {"contract/processors.py"}),
    ],
)
def test_nobody_else_asks_the_machine(name, files):
    """A plan from the machine's memory alone would have a container killed, and a container with
    two processors of 64 would start 64 threads."""
    assert files_that_say(name) == files
