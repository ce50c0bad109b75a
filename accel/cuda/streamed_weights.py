"""Weights that stay in page-locked host memory, and the ring of device memory for their copies.

Dense weights are copied to the ring by every step. Of a stack of experts a step of few tokens reads
some matrices only: kernels read these where they lie, over the link, and longer steps copy the
whole stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from accel.cuda.memory import Allocation, HostWeight
from accel.cuda.plan import PlannedLaunch
from accel.cuda.runtime import Runtime
from accel.cuda.weight_copies import CopyStream, WeightCopy, layer_copies
from accel.packets.buffers import DeviceBuffer
from accel.packets.layouts import WeightLayout
from accel.packets.staging_buffers import Bytes
from accel.packets.step import Step
from accel.packets.weight_ring import RING, WeightRing, ring_of
from contract.ir.nodes import BufferDecl, Graph

LINK_BYTES = 64 << 20
LINK_COPIES = 3
LOCKERS = min(8, os.cpu_count() or 1)
"""Threads that have pages locked."""
FEWEST_READS = 2
"""A stack is copied whole where its rows are at least one in so many of its matrices."""


@dataclass(slots=True)
class StreamedWeights:
    """The streamed weights of one device."""

    runtime: Runtime
    ring: WeightRing | None = None
    _memory: Allocation | None = None
    _ahead: dict[str, Future[tuple[Bytes, int]]] = field(default_factory=dict)

    def holds(self, decl: BufferDecl) -> bool:
        """Whether the weight ``decl`` is streamed."""
        return self.ring is not None and self.ring.holds(decl)

    def of(self, graph: Graph) -> frozenset[str]:
        """The weights of ``graph`` that are streamed."""
        if self.ring is None:
            return frozenset()
        return frozenset(name for name, decl in graph.buffers.items() if self.ring.holds(decl))

    def choose(
        self, graph: Graph, names: Collection[str], nbytes_of: Callable[[BufferDecl], int]
    ) -> None:
        """From now on stream ``names``; ``nbytes_of`` returns their bytes on the device. No step is
        running."""
        self.close()
        self.ring = ring_of(graph, names, nbytes_of) if names else None
        if self._memory is not None:
            self.runtime.memory.free(self._memory)
            self._memory = None

    def reserve(self) -> None:
        """Allocate the ring and begin to have pages locked. Raises OutOfMemory."""
        if self.ring is None or self._memory is not None:
            return
        self._memory = self.runtime.memory.allocate(RING, self.ring.nbytes)
        pool, lock = ThreadPoolExecutor(LOCKERS, "lock pages"), self.runtime.memory.pinned.mapped
        self._ahead = {n: pool.submit(lock, n, size) for n, size in self.ring.sizes.items()}
        pool.shutdown(wait=False)

    def close(self) -> None:
        """Have no more pages locked, and return when no thread does."""
        for ahead in self._ahead.values():
            ahead.cancel()
        wait(self._ahead.values())
        self._ahead = {}

    def allocate(self, decl: BufferDecl) -> Callable[[str, int], Allocation]:
        """A function that returns the memory of the streamed weight ``decl``. It raises
        OutOfMemory."""

        def allocation(name: str, nbytes: int) -> Allocation:
            assert self.ring is not None
            assert self._memory is not None
            ahead = self._ahead.pop(name, None)
            pinned = self.runtime.memory.pinned
            host, mapped = pinned.mapped(name, nbytes) if ahead is None else ahead.result()
            address = self._memory.address + self.ring.offsets[name]
            return HostWeight(address, nbytes, host, mapped=mapped)

        return allocation

    def read_in_place(self, graph: Graph, step: Step) -> frozenset[str]:
        """Stacks of which the step reads few matrices."""
        rows: dict[str, int] = {}
        for op in step.ops:
            for index in op.matrices:
                tensor = op.operands[index]
                if tensor is not None and len(graph.buffers[tensor.buffer].shape) == 3:
                    rows[tensor.buffer] = max(rows.get(tensor.buffer, 0), op.count.most)
        return frozenset(
            name
            for name, most in rows.items()
            if self.holds(decl := graph.buffers[name]) and most * FEWEST_READS <= int(decl.shape[0])
        )

    def copies(
        self,
        step: Step,
        launches: Collection[PlannedLaunch],
        names: Collection[str],
        buffers: Mapping[str, DeviceBuffer[Allocation]],
    ) -> CopyStream | None:
        """The copies of ``names`` in a step."""
        if self.ring is None or not names:
            return None
        layers = layer_copies(step, list(launches), self.ring, names)
        weights = {}
        for layer in layers:
            for name in layer.weights:
                matrix = buffers[name].matrix
                assert matrix is not None
                assert matrix.allocation.host is not None
                weights[name] = WeightCopy(matrix.allocation.address, matrix.allocation.host)
        memory = self.runtime.memory
        return CopyStream(memory.context, memory.streams.weights, layers, weights)

    def link_rate(self) -> float:
        """Bytes a second from page-locked memory to the device, as measured now. Raises
        OutOfMemory."""
        memory = self.runtime.memory
        host = memory.pinned.take(LINK_BYTES)
        target = memory.allocate("measuring the link", LINK_BYTES, zeroed=False)
        seconds = []
        try:
            for _ in range(LINK_COPIES):
                memory.synchronize()
                begin = time.perf_counter()
                memory.transfer(target, host, True, 0).wait()
                seconds.append(time.perf_counter() - begin)
        finally:
            memory.free(target)
        return LINK_BYTES / max(min(seconds), 1e-9)


def operand_in_place(buffer: DeviceBuffer[Allocation]) -> tuple[int, int, WeightLayout]:
    """The address, stride and layout of a streamed weight where it lies in host memory."""
    assert buffer.matrix is not None
    allocation = buffer.matrix.allocation
    assert isinstance(allocation, HostWeight)
    _, stride, layout = buffer.matrix.operand
    return allocation.mapped, stride, layout
