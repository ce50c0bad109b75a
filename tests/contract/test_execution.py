"""A recorded graph on a small tier: shapes of steps, replay and ports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.errors import ExecutionError
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


ROW, ROWS = range(4), range(8)


class TestForms:
    def test_replay_computes_on_its_inputs_and_the_bound_buffers(self) -> None:
        tier, out = ListTier(), memory("out")
        graph = executable(tier, "double", 2.0, out)
        graph.replay(inputs_of(graph, *ROW))
        assert out.floats.tolist() == [0, 2, 4, 6, 0, 0, 0, 0]
        fence = graph.replay(inputs_of(graph, *ROWS))
        assert out.floats.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert fence.done

    def test_a_fence_holds_what_was_wanted_of_its_own_step(self) -> None:
        graph = executable(ListTier(), "double", 2.0, memory("out"))
        first = graph.replay(inputs_of(graph, *ROWS), ["out"])
        second = graph.replay(inputs_of(graph, *ROW), ["out"])
        assert first.outputs["out"].view(np.float32).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert second.outputs["out"].view(np.float32).tolist() == [0, 2, 4, 6]
        assert graph.replay(inputs_of(graph, *ROW)).outputs == {}

    def test_a_step_takes_the_smallest_form_that_holds_it(self) -> None:
        tier = ListTier()
        graph = executable(tier, "g", 2.0, memory("out"))
        assert graph.buckets == (ONE, TWO)
        assert [graph.bucket_of(ShapeKey(n, 0)) for n in (0, 1, 2)] == [ONE, ONE, TWO]

    def test_a_form_is_lowered_once(self) -> None:
        tier = ListTier()
        graph = executable(tier, "g", 2.0, memory("out"))
        for values in (ROW, ROWS, ROW, ROWS, ROW):
            graph.replay(inputs_of(graph, *values))
        assert tier.lowered == [ONE, TWO]
        assert graph.recorded == (ONE, TWO)
        assert len(tier.submitted) == 5

    @pytest.mark.parametrize("step", [ShapeKey(3, 0), ShapeKey(1, 1)])
    def test_a_step_larger_than_the_largest(self, step: ShapeKey) -> None:
        tier = ListTier()
        graph = executable(tier, "g", 2.0, memory("out"))
        with pytest.raises(ExecutionError, match=f"graph g: a step of .*{step.tokens}.* is larger"):
            graph.replay(pack_inputs(graph.inputs, step, {}))
        assert tier.submitted == []

    def test_a_batch_refuses_a_step_beyond_its_form(self) -> None:
        tier = ListTier()
        graph = executable(tier, "g", 2.0, memory("out"))
        batch = graph.batch(inputs_of(graph, *ROW))
        with pytest.raises(ValueError, match="at most"):
            tier.submit(batch, inputs_of(graph, *ROWS))


class TestPorts:
    def test_binding_another_buffer_drops_what_was_recorded(self) -> None:
        b, c = memory("b"), memory("c")
        graph = executable(ListTier(), "g", 2.0, b)
        graph.record(ONE)
        graph.bind("out", b)
        assert graph.recorded == (ONE,)
        graph.bind("out", c)
        assert graph.recorded == ()
        graph.replay(inputs_of(graph, 1, 1, 1, 1))
        assert (b.floats.sum(), c.floats.sum()) == (0, 8)

    def test_graphs_are_wired_by_sharing_a_buffer(self) -> None:
        tier, shared, out = ListTier(), memory("shared"), memory("out")
        first = executable(tier, "first", 2.0, shared)
        second = chained(tier, "second", 3.0, shared, out)
        first.replay(inputs_of(first, 1, 1, 1, 1))
        second.replay(inputs_of(second))
        assert out.floats[:WIDTH].tolist() == [6.0] * WIDTH

    @pytest.mark.parametrize("port", ["side", "in", "scratch.half"])
    def test_no_port(self, port: str) -> None:
        """Neither an unknown name, nor inputs, nor a step's own memory."""
        b = GraphBuilder("g")
        x = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", WIDTH))
        half = b.emit(Opcode.SCALE, "half", x=x, factor=0.5)
        b.emit(Opcode.SCALE, x=half, factor=0.5, y=b.output("out", "tokens", WIDTH))
        with pytest.raises(ExecutionError, match=f"graph g has no port '{port}'"):
            ExecutableGraph(ListTier(), b.build(), {port: memory("c")}, ONE)

    def test_recording_with_an_unbound_port(self) -> None:
        graph = ExecutableGraph(ListTier(), scale_graph("g", 2.0), {}, ONE)
        with pytest.raises(ExecutionError, match="port 'out' is not bound"):
            graph.record(ONE)

    def test_a_buffer_too_small_for_the_largest_step(self) -> None:
        with pytest.raises(ExecutionError, match=r"port 'out' needs 32 bytes .* has 16"):
            executable(ListTier(), "g", 2.0, memory("b", 1))
