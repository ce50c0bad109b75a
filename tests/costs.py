"""A plugin of pytest that reports what tests cost: seconds and memory by folder of tests."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

KIBIBYTE = 1024
GIGABYTE = 1e9
LIMIT_GIGABYTES = 1.5
"""Most memory that a process of tests should have: a machine with 8 GB runs several of them."""


@dataclass
class Folder:
    """Costs of the tests of one folder. Memory is the largest of a process after one of them."""

    tests: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    memory: float = 0.0
    grown: float = 0.0


@dataclass
class Costs:
    """Costs by folder, and the largest memory of each process."""

    folders: dict[str, Folder] = field(default_factory=lambda: defaultdict(Folder))
    processes: dict[str, float] = field(default_factory=dict)


COSTS = pytest.StashKey[Costs]()


def processor_seconds() -> float:
    """Processor time of this process and of the ended ones that it started, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_memory() -> float:
    """The most resident memory that this process had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE / GIGABYTE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Notes what a test starts from."""
    item.stash[START] = (processor_seconds(), peak_memory())
    return (yield)


START = pytest.StashKey[tuple[float, float]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Adds the costs of a test to the report of its last phase."""
    report = yield
    if report.when == "teardown":
        seconds, memory = item.stash[START]
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        report.costs = [worker, processor_seconds() - seconds, peak_memory(), memory]
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Begins with no costs."""
    config.stash[COSTS] = Costs()
    config.pluginmanager.register(Collector(config.stash[COSTS]), "costs of tests")


class Collector:
    """Adds up reports, those of other processes too."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the costs of one phase of a test to its folder."""
        folder = self._costs.folders[folder_of(report.nodeid)]
        folder.seconds += report.duration
        noted = getattr(report, "costs", None)
        if noted is None:
            return
        worker, seconds, memory, before = noted
        folder.tests += 1
        folder.processor_seconds += seconds
        folder.memory = max(folder.memory, memory)
        folder.grown += memory - before
        self._costs.processes[worker] = max(self._costs.processes.get(worker, 0.0), memory)


def folder_of(nodeid: str) -> str:
    """The folder below ``tests`` that a test is in, or its file."""
    parts = Path(nodeid.split("::")[0]).parts
    return parts[1] if len(parts) > 1 else parts[0]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints a line a folder, the dearest first, and the processes with too much memory."""
    costs = config.stash[COSTS]
    if not costs.processes:
        return
    terminalreporter.section("costs by folder")
    terminalreporter.write_line("tests  seconds  processor s  peak GB  grown GB  folder")
    order = sorted(costs.folders.items(), key=lambda one: -one[1].seconds)
    for name, one in order:
        figures = f"{one.tests:5} {one.seconds:8.1f} {one.processor_seconds:12.1f}"
        terminalreporter.write_line(f"{figures} {one.memory:8.2f} {one.grown:9.2f}  {name}")
    for worker, memory in sorted(costs.processes.items()):
        note = f", more than {LIMIT_GIGABYTES}" if memory > LIMIT_GIGABYTES else ""
        terminalreporter.write_line(f"process {worker}: at most {memory:.2f} GB{note}")
