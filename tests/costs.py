"""A plugin of pytest: what tests cost, by folder, and memory given back between tests."""

import ctypes
import gc
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

KIBIBYTE = 1024
GIGABYTE = 1e9
LIMIT_GIGABYTES = 1.5
"""Most memory that a process of tests should have: a machine with 8 GB runs several of them."""
GROWTH_GIGABYTES = 0.1
"""How much a process may grow until what it freed is given back to the system."""
RISE_GIGABYTES = 0.1
"""A test that raises the most memory of its process by so much is named."""
FILES_SHOWN = 25
MIN_TESTS = 500
"""A smaller run prints no costs."""


@dataclass
class Folder:
    """Costs of the tests of one folder. Memory is the largest of a process after one of them."""

    tests: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    memory: float = 0.0


@dataclass
class Costs:
    """Costs by folder, processor seconds by file, and the largest memory of each process, in GB,
    with the tests that raised it."""

    folders: dict[str, Folder] = field(default_factory=lambda: defaultdict(Folder))
    files: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    processes: dict[str, float] = field(default_factory=dict)
    raised: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def note_memory(self, process: str, memory: float, test: str) -> None:
        """Note the most memory that a process had up to the end of a test."""
        before = self.processes.get(process, 0.0)
        if memory >= before + RISE_GIGABYTES:
            self.raised[process].append(f"{memory:.2f} GB since {test}")
        self.processes[process] = max(before, memory)


START = pytest.StashKey[float]()


def processor_seconds() -> float:
    """Processor time of this process and of the ended ones that it started, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_memory() -> float:
    """The most resident memory that this process had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE / GIGABYTE


class FreedMemory:
    """Gives garbage and freed memory back: the C library keeps what compilers have used."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._process = psutil.Process()
        self._base = self._resident()

    def give_back(self) -> None:
        """Collects the garbage of a process that has grown since the last time, and trims it: the
        arrays of a closed engine are in cycles, which so few objects seldom have collected."""
        now = self._resident()
        if now <= self._base + GROWTH_GIGABYTES:
            self._base = min(self._base, now)
            return
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        self._base = self._resident()

    def _resident(self) -> float:
        return float(self._process.memory_info().rss) / GIGABYTE


class CostsOfTests:
    """Notes costs where tests run, and adds up those of all processes where they are reported."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._freed = FreedMemory()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        """Notes what a test starts from, and empties the caches of a folder that is left."""
        item.stash[START] = processor_seconds()
        result = yield
        folder = folder_of(item.nodeid)
        if nextitem is None or folder_of(nextitem.nodeid) != folder:
            empty_caches(f"tests.{folder}.")
        self._freed.give_back()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Adds the costs of a test to the report of its last phase."""
        report = yield
        if report.when == "teardown":
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            report.costs = [worker, processor_seconds() - item.stash[START], peak_memory()]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the costs of one phase of a test to its folder."""
        folder = self._costs.folders[folder_of(report.nodeid)]
        folder.seconds += report.duration
        noted = getattr(report, "costs", None)
        if noted is None:
            return
        worker, seconds, memory = noted
        folder.tests += 1
        folder.processor_seconds += seconds
        folder.memory = max(folder.memory, memory)
        self._costs.files[report.nodeid.partition("::")[0]] += seconds
        self._costs.note_memory(worker, memory, report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints a line a folder, the longest first, the files that take most, and the memory of
        each process."""
        folders = self._costs.folders
        if sum(one.tests for one in folders.values()) < MIN_TESTS:
            return
        terminalreporter.section("costs by folder")
        terminalreporter.write_line("tests  seconds  processor seconds  GB so far  folder")
        for name, one in sorted(folders.items(), key=lambda pair: -pair[1].seconds):
            figures = f"{one.tests:5} {one.seconds:8.1f} {one.processor_seconds:18.1f}"
            terminalreporter.write_line(f"{figures} {one.memory:10.2f}  {name}")
        for worker, memory in sorted(self._costs.processes.items()):
            note = f", more than {LIMIT_GIGABYTES}" if memory > LIMIT_GIGABYTES else ""
            terminalreporter.write_line(f"process {worker}: at most {memory:.2f} GB{note}")
            if note:
                terminalreporter.write_line("  " + "\n  ".join(self._costs.raised[worker]))
        terminalreporter.write_line("processor seconds  file")
        dearest = sorted(self._costs.files.items(), key=lambda pair: -pair[1])[:FILES_SHOWN]
        for name, seconds in dearest:
            terminalreporter.write_line(f"{seconds:17.1f}  {name}")


def empty_caches(prefix: str) -> None:
    """Clear what functions of the modules whose names begin so have cached."""
    for name, module in list(sys.modules.items()):
        for function in list(vars(module).values()) if name.startswith(prefix) else ():
            if str(getattr(function, "__module__", "")).startswith(prefix):
                clear = getattr(function, "cache_clear", None)
                if clear is not None:
                    clear()


def folder_of(nodeid: str) -> str:
    """The folder below ``tests`` that a test is in, or its file."""
    parts = Path(nodeid.split("::")[0]).parts
    return parts[1] if len(parts) > 1 else parts[0]


def register(config: pytest.Config) -> None:
    """Makes the plugin one of this run."""
    config.pluginmanager.register(CostsOfTests(Costs()), "costs of tests")
