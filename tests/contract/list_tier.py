"""A small in-memory tier that really computes, and logs what it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.execution import ExecutableGraph
from contract.footprint import Footprint, declared_footprint
from contract.ir.graph import BufferDecl, BufferKind, Graph, GraphBuilder
from contract.kernel import KernelHeader, decode_kernel
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Heap, TierInfo, check_range

WIDTH = 4
ONE, TWO = ShapeKey(1, 0), ShapeKey(2, 0)


@dataclass(eq=False)
class Memory:
    name: str
    heap: Heap
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def floats(self) -> NDArray[np.float32]:
        return self.data.view(np.float32)


@dataclass
class Batch:
    graph: Graph
    buffers: Mapping[str, Memory]
    key: ShapeKey

    @property
    def packets(self) -> int:
        return len(self.graph.nodes)


@dataclass
class Done:
    number: int
    done: bool = True


@dataclass
class Loaded:
    header: KernelHeader


@dataclass
class ListTier:
    """Runs graphs of SCALE nodes the moment they are submitted, and keeps the order."""

    submitted: list[str] = field(default_factory=list)
    lowered: list[ShapeKey] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    @property
    def info(self) -> TierInfo:
        return TierInfo("list", "none", "none", "exact-2", frozenset({Opcode.SCALE}), 0, True)

    @property
    def allocated_bytes(self) -> int:
        return 0

    @property
    def available_bytes(self) -> int:
        return 0

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        return declared_footprint(graph, largest)

    def reserve(self, graph: Graph, largest: ShapeKey, variants: int) -> None:
        pass

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> Memory:
        return Memory(decl.name, heap, np.zeros(nbytes, np.uint8))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> Memory:
        return Memory(decl.name, Heap.DEVICE_LOCAL, data)

    def free(self, buffer: Memory) -> None:
        del buffer.data

    def map(self, buffer: Memory) -> NDArray[np.uint8]:
        return buffer.data

    def read(self, buffer: Memory, offset: int, nbytes: int) -> NDArray[np.uint8]:
        check_range(buffer, offset, nbytes)
        return buffer.data[offset : offset + nbytes].copy()

    def write(self, buffer: Memory, offset: int, data: NDArray[np.uint8]) -> None:
        check_range(buffer, offset, data.nbytes)
        buffer.data[offset : offset + data.nbytes] = data

    def load_kernel(self, blob: bytes) -> Loaded:
        return Loaded(decode_kernel(blob))

    def lower(self, graph: Graph, buffers: Mapping[str, Memory], key: ShapeKey) -> Batch:
        self.lowered.append(key)
        return Batch(graph, dict(buffers), key)

    def submit(self, batch: Batch, *, resume: bool = False) -> Done:
        self.submitted.append(batch.graph.name)
        for node in batch.graph.nodes:
            x, y = (batch.buffers[node.operands[name].buffer].floats for name in ("x", "y"))
            count = batch.key.tokens * WIDTH
            y[:count] = x[:count] * np.float32(node.params["factor"])
        return Done(len(self.submitted))

    def wait(self, fence: Done, timeout: float | None = None) -> None:
        self.waited.append(fence.number)

    def close(self) -> None:
        self.submitted.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def scale_graph(name: str, factor: float) -> Graph:
    b = GraphBuilder(name)
    x = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", WIDTH))
    b.emit(Opcode.SCALE, x=x, factor=factor, y=b.output("out", "tokens", WIDTH))
    return b.build()


def memory(name: str, tokens: int = 2) -> Memory:
    return Memory(name, Heap.HOST_VISIBLE, np.zeros(tokens * WIDTH * 4, np.uint8))


def executable(
    tier: ListTier, name: str, factor: float, source: Memory, target: Memory, capacity: int = 4
) -> ExecutableGraph:
    buffers = {"in": source, "out": target}
    return ExecutableGraph(tier, scale_graph(name, factor), buffers, capacity)
