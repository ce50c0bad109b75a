"""Caches the memory that steps of a graph need, because computing it lowers every shape bucket.

The key of an entry covers everything its value depends on: the graph, the largest step, the tier's
parameters, and times and sizes of the modules that lower. A wrong entry would only change
estimates: a step allocates what it needs when it is lowered."""

from __future__ import annotations

import functools
import json
import marshal
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import accel.packets
import contract.ir
import contract.ops
from accel.digests import digest
from accel.packets.disk_cache import read_entry, write_entry
from accel.packets.footprint import StepMemory
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey

MAGIC = b"zinc-rt step memory 1\n"
SUFFIX = ".memory"
CODE = (accel.packets, contract, contract.ir, contract.ops)
"""Packages whose modules determine what a graph is lowered to."""


T = TypeVar("T")


class EstimateCache(Generic[T]):
    """The cached entries in one ``folder``. ``parameters`` are a tier's inputs of lowering besides
    the graph and its sizes. ``encoded`` and ``decoded`` convert a value to and from JSON types."""

    def __init__(
        self,
        folder: Path,
        parameters: tuple[str | int, ...],
        encoded: Callable[[T], Any],
        decoded: Callable[[Any], T],
    ) -> None:
        self._folder = folder
        self._parameters = parameters
        self._encoded = encoded
        self._decoded = decoded

    def of(self, graph: Graph, largest: ShapeKey, make: Callable[[], T]) -> T:
        """The cached value, or that of ``make``, which is then cached. Raises as ``make`` does."""
        code = code_state()
        if code is None:
            return make()
        name = entry_name(graph, code, self._parameters, largest)
        path = (self._folder / name).with_suffix(SUFFIX)
        data = read_entry(path, MAGIC)
        if data is not None:
            return self._decoded(json.loads(data))
        made = make()
        write_entry(path, MAGIC, json.dumps(self._encoded(made)).encode())
        return made


class StepMemoryCache(EstimateCache[StepMemory]):
    """The cache of tiers that estimate ``StepMemory`` only."""

    def __init__(self, folder: Path, parameters: tuple[str | int, ...]) -> None:
        super().__init__(folder, parameters, encoded_memory, decoded_memory)


@functools.cache
def code_state(packages: tuple[ModuleType, ...] = CODE) -> str | None:
    """A text that changes with every module of the packages; None if they are not in files."""
    try:
        return repr([entry for package in packages for entry in _modules(package.__path__[0])])
    except OSError:
        return None


def _modules(folder: str) -> Iterator[tuple[str, int, int, int]]:
    """Path, times and size of each module. Packaging may set a file's modification time to the same
    value for every version, so the time of its status change counts too."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def entry_name(graph: Graph, *others: object) -> str:
    """The name of an entry for a graph and ``others``; equal inputs give equal names."""
    buffers = [
        (name, int(decl.kind), decl.dtype.name, decl.shape, decl.source)
        for name, decl in graph.buffers.items()
    ]
    nodes = [
        (
            node.name,
            int(node.opcode),
            [(name, view.buffer, view.columns, view.rows) for name, view in node.operands.items()],
            list(node.params.items()),
        )
        for node in graph.nodes
    ]
    described = graph.name, graph.stage.value, buffers, nodes
    # repr takes three times as long. Later versions of marshal give equal strings other bytes.
    return digest(marshal.dumps(described, 2) + repr(others).encode()).hexdigest()


def encoded_memory(memory: StepMemory) -> list[Any]:
    """A StepMemory as JSON types."""
    stored, kinds = sorted(memory.stored), sorted(memory.kinds)
    return [memory.shared, memory.own, memory.packets, stored, kinds]


def decoded_memory(data: Any) -> StepMemory:
    """The StepMemory of ``encoded_memory``'s JSON types."""
    shared, own, packets, stored, kinds = data
    return StepMemory(shared, own, tuple(packets), frozenset(stored), frozenset(map(tuple, kinds)))
