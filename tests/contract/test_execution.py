"""A recorded graph on a small tier: shapes of steps, replay and ports."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract import execution
from contract.dtypes import F32
from contract.errors import ExecutionError
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import InputLayout, pack_inputs
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.cpu.tier import CpuBatch, CpuBuffer, CpuFence, CpuTier

WIDTH, MOST = 4, 2
ONE, TWO = ShapeKey(1, 0), ShapeKey(2, 0)


class Watched(CpuTier):
    """Has two forms of a step, and notes those that are lowered and the steps that are run."""

    def __init__(self) -> None:
        super().__init__(1)
        self.lowered: list[ShapeKey] = []
        self.steps = 0

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        return tuple(sorted({ShapeKey(min(1, largest.tokens), 0), largest}, key=ShapeKey.pack))

    def lower(self, graph: Graph, buffers: Any, bucket: ShapeKey, inputs: InputLayout) -> CpuBatch:
        self.lowered.append(bucket)
        return super().lower(graph, buffers, bucket, inputs)

    def submit(self, *step: Any) -> CpuFence:
        self.steps += 1
        return super().submit(*step)


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


def memory(name: str, tokens: int = MOST) -> CpuBuffer:
    return CpuBuffer(name, tokens * WIDTH * 4, np.zeros(tokens * WIDTH * 4, np.uint8))


def floats(buffer: CpuBuffer) -> NDArray[np.float32]:
    return buffer.data.view(np.float32)


def executable(tier: Watched, name: str, factor: float, target: CpuBuffer) -> ExecutableGraph:
    """``target`` = ``factor`` times a step's inputs."""
    return ExecutableGraph(tier, scale_graph(name, factor), {"out": target}, TWO)


def chained(
    tier: Watched, name: str, factor: float, source: CpuBuffer, target: CpuBuffer
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
    def test_replay_computes_on_its_inputs_and_the_bound_buffers(self):
        tier, out = Watched(), memory("out")
        graph = executable(tier, "double", 2.0, out)
        graph.replay(inputs_of(graph, *ROW))
        assert floats(out).tolist() == [0, 2, 4, 6, 0, 0, 0, 0]
        fence = graph.replay(inputs_of(graph, *ROWS))
        assert floats(out).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert fence.done

    def test_a_fence_holds_what_was_wanted_of_its_own_step(self):
        graph = executable(Watched(), "double", 2.0, memory("out"))
        first = graph.replay(inputs_of(graph, *ROWS), ["out"])
        second = graph.replay(inputs_of(graph, *ROW), ["out"])
        assert first.outputs["out"].view(np.float32).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert second.outputs["out"].view(np.float32).tolist() == [0, 2, 4, 6]
        assert graph.replay(inputs_of(graph, *ROW)).outputs == {}

    def test_a_step_takes_the_smallest_form_that_holds_it(self):
        tier = Watched()
        graph = executable(tier, "g", 2.0, memory("out"))
        assert graph.buckets == (ONE, TWO)
        assert [graph.bucket_of(ShapeKey(n, 0)) for n in (0, 1, 2)] == [ONE, ONE, TWO]

    def test_a_form_is_lowered_once(self):
        tier = Watched()
        graph = executable(tier, "g", 2.0, memory("out"))
        for values in (ROW, ROWS, ROW, ROWS, ROW):
            graph.replay(inputs_of(graph, *values))
        assert tier.lowered == [ONE, TWO]
        assert graph.recorded == (ONE, TWO)
        assert tier.steps == 5

    def test_batches_of_more_kinds_than_are_remembered(self, monkeypatch):
        monkeypatch.setattr(execution, "MAX_CHOSEN", 1)
        tier, out = Watched(), memory("out")
        graph = executable(tier, "g", 2.0, out)
        for values in (ROW, ROWS, ROW, ROWS):
            floats(out)[:] = 0
            fence = graph.replay(inputs_of(graph, *values), ["out"])
            assert fence.outputs["out"].view(np.float32).tolist() == [2 * x for x in values]
        assert tier.lowered == [ONE, TWO]

    @pytest.mark.parametrize("step", [ShapeKey(3, 0), ShapeKey(1, 1)])
    def test_a_step_larger_than_the_largest(self, step):
        tier = Watched()
        graph = executable(tier, "g", 2.0, memory("out"))
        with pytest.raises(ExecutionError, match=f"graph g: a step of .*{step.tokens}.* is larger"):
            graph.replay(pack_inputs(graph.inputs, step, {}))
        assert tier.steps == 0

    def test_a_batch_refuses_a_step_beyond_its_form(self):
        tier = Watched()
        graph = executable(tier, "g", 2.0, memory("out"))
        batch = graph.batch(inputs_of(graph, *ROW))
        with pytest.raises(ValueError, match="at most"):
            tier.submit(batch, inputs_of(graph, *ROWS))


class TestPorts:
    def test_binding_another_buffer_drops_what_was_recorded(self):
        b, c = memory("b"), memory("c")
        graph = executable(Watched(), "g", 2.0, b)
        graph.replay(inputs_of(graph, 2, 2, 2, 2))
        graph.bind("out", b)
        assert graph.recorded == (ONE,)
        graph.bind("out", c)
        assert graph.recorded == ()
        graph.replay(inputs_of(graph, 1, 1, 1, 1))
        assert (floats(b).sum(), floats(c).sum()) == (16, 8)

    def test_graphs_are_wired_by_sharing_a_buffer(self):
        tier, shared, out = Watched(), memory("shared"), memory("out")
        first = executable(tier, "first", 2.0, shared)
        second = chained(tier, "second", 3.0, shared, out)
        first.replay(inputs_of(first, 1, 1, 1, 1))
        second.replay(inputs_of(second))
        assert floats(out)[:WIDTH].tolist() == [6.0] * WIDTH

    @pytest.mark.parametrize("port", ["side", "in", "scratch.half"])
    def test_no_port(self, port):
        """Neither an unknown name, nor inputs, nor a step's own memory."""
        b = GraphBuilder("g")
        x = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", WIDTH))
        half = b.emit(Opcode.SCALE, "half", x=x, factor=0.5)
        b.emit(Opcode.SCALE, x=half, factor=0.5, y=b.output("out", "tokens", WIDTH))
        with pytest.raises(ExecutionError, match=f"graph g has no port '{port}'"):
            ExecutableGraph(Watched(), b.build(), {port: memory("c")}, ONE)

    def test_recording_with_an_unbound_port(self):
        graph = ExecutableGraph(Watched(), scale_graph("g", 2.0), {}, ONE)
        with pytest.raises(ExecutionError, match="port 'out' is not bound"):
            graph.record(ONE)

    def test_a_buffer_too_small_for_the_largest_step(self):
        with pytest.raises(ExecutionError, match=r"port 'out' needs 32 bytes .* has 16"):
            executable(Watched(), "g", 2.0, memory("b", 1))
