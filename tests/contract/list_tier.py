"""A small in-memory tier that really computes, and logs what it was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.execution import ExecutableGraph
from contract.footprint import Footprint, declared_footprint
from contract.ir.graph import BufferDecl, BufferKind, Graph, GraphBuilder
from contract.ir.inputs import InputLayout, InputRows, pack_inputs, step_of
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import TierInfo, check_bucket, check_range

WIDTH, MOST = 4, 2
ONE, TWO = ShapeKey(1, 0), ShapeKey(2, 0)


@dataclass(eq=False)
class Memory:
    name: str
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
    bucket: ShapeKey
    inputs: InputLayout

    @property
    def packets(self) -> int:
        return len(self.graph.nodes)


@dataclass
class Done:
    outputs: Mapping[str, NDArray[np.uint8]]
    done: bool = True


@dataclass
class ListTier:
    """Runs graphs of one SCALE node the moment they are submitted, and keeps the order.

    ``x`` is the graph's inputs where it is a REQUEST buffer."""

    submitted: list[str] = field(default_factory=list)
    lowered: list[ShapeKey] = field(default_factory=list)

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

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        return tuple(sorted({ShapeKey(min(1, largest.tokens), 0), largest}))

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        pass

    def alloc(self, decl: BufferDecl, nbytes: int) -> Memory:
        return Memory(decl.name, np.zeros(nbytes, np.uint8))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> Memory:
        return Memory(decl.name, data)

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

    def lower(
        self, graph: Graph, buffers: Mapping[str, Memory], bucket: ShapeKey, inputs: InputLayout
    ) -> Batch:
        self.lowered.append(bucket)
        return Batch(graph, dict(buffers), bucket, inputs)

    def submit(
        self, batch: Batch, inputs: NDArray[np.uint8], requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> Done:  # fmt: skip
        step = step_of(inputs)
        check_bucket(batch.bucket, step)
        self.submitted.append(batch.graph.name)
        (node,) = batch.graph.nodes
        count = step.tokens * WIDTH
        source, y = node.operands["x"].buffer, batch.buffers[node.operands["y"].buffer]
        if source in batch.buffers:
            x = batch.buffers[source].floats
        else:
            x = inputs[batch.inputs.offsets[source] :].view(np.float32)
        y.floats[:count] = x[:count] * np.float32(node.params["factor"])
        return Done({name: batch.buffers[name].data[: 4 * count].copy() for name in requested})

    def wait(self, fence: Done, timeout: float | None = None) -> None:
        pass

    def close(self) -> None:
        self.submitted.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def scale_graph(name: str, factor: float, *, chained: bool = False) -> Graph:
    """y = factor x: of a step's inputs, or of what another graph left (``chained``)."""
    b = GraphBuilder(name)
    if chained:
        x = b.buffer("in", BufferKind.WEIGHT, F32, (MOST, WIDTH))
        y = b.output("out", MOST, WIDTH)
    else:
        x = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", WIDTH))
        y = b.output("out", "tokens", WIDTH)
    b.emit(Opcode.SCALE, x=x, factor=factor, y=y)
    return b.build()


def memory(name: str, tokens: int = MOST) -> Memory:
    return Memory(name, np.zeros(tokens * WIDTH * 4, np.uint8))


def executable(tier: ListTier, name: str, factor: float, target: Memory) -> ExecutableGraph:
    """``target`` = ``factor`` times a step's inputs."""
    return ExecutableGraph(tier, scale_graph(name, factor), {"out": target}, TWO)


def chained(
    tier: ListTier, name: str, factor: float, source: Memory, target: Memory
) -> ExecutableGraph:
    """``target`` = ``factor`` times ``source``."""
    graph = scale_graph(name, factor, chained=True)
    return ExecutableGraph(tier, graph, {"in": source, "out": target}, TWO)


def inputs_of(graph: ExecutableGraph, *values: float) -> NDArray[np.uint8]:
    """A step of one token, or of two, for each WIDTH ``values``."""
    step = ShapeKey(max(1, len(values) // WIDTH), 0)
    arrays = {"in": np.array(values, np.float32)} if "in" in graph.inputs.offsets else {}
    return pack_inputs(graph.inputs, step, arrays)
