"""Execution objects over a small tier: forms of steps, ports, streams, events, plans, copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.dtypes import F32
from contract.errors import ExecutionError
from contract.execution import Event, ExecutableGraph, Plan, Stream, copy_buffer
from contract.ir.graph import BufferKind, GraphBuilder
from contract.ir.inputs import pack_inputs
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.contract.list_tier import (
    ONE,
    TWO,
    WIDTH,
    ListTier,
    chained,
    executable,
    inputs_of,
    memory,
    scale_graph,
)

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


def named(tier: ListTier, name: str) -> ExecutableGraph:
    return executable(tier, name, 1.0, memory("out"))


def replay_on(tier: ListTier, name: str, stream: Stream) -> None:
    graph = named(tier, name)
    graph.replay_on(inputs_of(graph), stream)


def add(plan: Plan, tier: ListTier, name: str, stream: Stream) -> int:
    graph = named(tier, name)
    return plan.add(graph, inputs_of(graph), stream)


class TestStreams:
    def test_an_event_holds_another_stream_back(self) -> None:
        tier = ListTier()
        first, second, event = Stream(tier), Stream(tier), Event()
        second.wait(event)
        replay_on(tier, "late", second)
        assert second.blocked
        assert tier.submitted == []
        replay_on(tier, "early", first)
        event.record(first)
        assert not second.blocked
        assert tier.submitted == ["early", "late"]

    def test_a_recorded_event_holds_nothing_back(self) -> None:
        tier = ListTier()
        stream, event = Stream(tier), Event()
        event.record(stream)
        stream.wait(event)
        replay_on(tier, "g", stream)
        assert tier.submitted == ["g"]

    def test_an_event_is_a_point_in_its_stream(self) -> None:
        """Recorded in a blocked stream, an event counts only once that stream gets there."""
        tier = ListTier()
        a, b, gate, event = Stream(tier), Stream(tier), Event(), Event()
        a.wait(gate)
        replay_on(tier, "before", a)
        event.record(a)
        b.wait(event)
        replay_on(tier, "after", b)
        assert not event.recorded
        gate.record(Stream(tier))
        assert event.recorded
        assert tier.submitted == ["before", "after"]

    def test_a_blocked_submission_holds_its_inputs(self) -> None:
        """The caller writes the next ones at once, whenever the step gets to run."""
        tier, out, gate = ListTier(), memory("out"), Event()
        graph, stream = executable(tier, "g", 2.0, out), Stream(tier)
        stream.wait(gate)
        inputs = inputs_of(graph, *ROW)
        graph.replay_on(inputs, stream)
        inputs[:] = inputs_of(graph, 9, 9, 9, 9)
        gate.record(Stream(tier))
        assert out.floats[:WIDTH].tolist() == [0, 2, 4, 6]

    def test_an_event_may_be_recorded_again(self) -> None:
        tier = ListTier()
        a, b, gate, event = Stream(tier), Stream(tier), Event(), Event()
        event.record(a)
        a.wait(gate)
        event.record(a)
        b.wait(event)
        assert b.blocked
        gate.record(Stream(tier))
        assert not b.blocked

    def test_priority_decides_who_an_event_releases_first(self) -> None:
        tier, event = ListTier(), Event()
        for name, priority in (("low", 0), ("high", 5), ("low too", 0)):
            stream = Stream(tier, priority)
            stream.wait(event)
            replay_on(tier, name, stream)
        event.record(Stream(tier))
        assert tier.submitted == ["high", "low", "low too"]

    def test_synchronize_waits_for_the_last_submission(self) -> None:
        tier = ListTier()
        stream = Stream(tier)
        stream.synchronize()
        assert tier.waited == []
        for name in ("a", "b"):
            replay_on(tier, name, stream)
        stream.synchronize()
        assert tier.waited == [2]

    def test_synchronizing_a_blocked_stream_is_an_error(self) -> None:
        stream = Stream(ListTier())
        stream.wait(Event())
        with pytest.raises(ExecutionError, match="nothing recorded"):
            stream.synchronize()


class TestPlan:
    def test_a_diamond_runs_dependencies_first(self) -> None:
        tier = ListTier()
        streams = [Stream(tier) for _ in range(3)]
        plan = Plan()
        nodes = {
            name: add(plan, tier, name, streams[i % 3])
            for i, name in enumerate(("sink", "left", "right", "source"))
        }
        for before, after in (("source", "left"), ("source", "right"), ("left", "sink"),
                              ("right", "sink")):  # fmt: skip
            plan.after(nodes[after], nodes[before])
        plan.execute()
        assert tier.submitted == ["source", "left", "right", "sink"]
        plan.execute()
        assert tier.submitted[4:] == tier.submitted[:4]

    def test_a_dependency_holds_across_streams(self) -> None:
        """A dependency stuck in a blocked stream keeps its dependants on other streams back."""
        tier, gate = ListTier(), Event()
        stuck, free = Stream(tier), Stream(tier)
        stuck.wait(gate)
        plan = Plan()
        source = add(plan, tier, "source", stuck)
        sink = add(plan, tier, "sink", free)
        add(plan, tier, "other", Stream(tier))
        plan.after(sink, source)
        plan.execute()
        assert tier.submitted == ["other"]
        gate.record(Stream(tier))
        assert tier.submitted == ["other", "source", "sink"]

    def test_a_chain_of_graphs_hands_its_buffers_on(self) -> None:
        tier = ListTier()
        buffers = [memory(str(i)) for i in range(4)]
        plan = Plan()
        previous = None
        for i in range(3):
            graph = chained(tier, str(i), 2.0, buffers[i], buffers[i + 1])
            node = plan.add(graph, inputs_of(graph), Stream(tier))
            if previous is not None:
                plan.after(node, previous)
            previous = node
        buffers[0].floats[:] = 1
        plan.execute()
        assert buffers[3].floats[0] == 8

    @given(edges=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
    def test_every_order_respects_every_edge(self, edges: set[tuple[int, int]]) -> None:
        """Random edges: those closing a cycle are refused, the rest hold in the order."""
        tier = ListTier()
        plan = Plan()
        graph = named(tier, "g")
        for _ in range(8):
            plan.add(graph, inputs_of(graph), Stream(tier))
        kept = []
        for before, after in sorted(edges):
            try:
                plan.after(after, before)
            except ExecutionError:
                assert after == before or _reaches(kept, after, before)
            else:
                kept.append((before, after))
        order = plan.order()
        assert sorted(order) == list(range(8))
        assert all(order.index(before) < order.index(after) for before, after in kept)
        plan.execute()
        assert len(tier.submitted) == 8

    def test_a_cycle_is_refused(self) -> None:
        tier = ListTier()
        plan = Plan()
        a, b, c = (add(plan, tier, name, Stream(tier)) for name in "abc")
        plan.after(b, a)
        plan.after(c, b)
        for before, after in ((c, a), (a, a), (b, a)):
            with pytest.raises(ExecutionError, match="cycle"):
                plan.after(after, before)

    def test_an_unknown_node(self) -> None:
        with pytest.raises(ExecutionError, match="no node 1"):
            Plan().after(1, 0)

    def test_what_cannot_be_lowered_is_found_before_anything_runs(self) -> None:
        tier = ListTier()
        plan = Plan()
        add(plan, tier, "ready", Stream(tier))
        unbound = ExecutableGraph(tier, scale_graph("unbound", 2.0), {}, ONE)
        plan.add(unbound, inputs_of(unbound), Stream(tier))
        with pytest.raises(ExecutionError, match="unbound"):
            plan.execute()
        assert tier.submitted == []


def _reaches(edges: list[tuple[int, int]], start: int, goal: int) -> bool:
    return start == goal or any(
        _reaches(edges, after, goal) for before, after in edges if before == start
    )


class TestCopy:
    def test_a_copy_keeps_its_place_in_the_stream(self) -> None:
        tier, b, c = ListTier(), memory("b"), memory("c")
        graph = executable(tier, "g", 2.0, b)
        stream = Stream(tier)
        graph.replay_on(inputs_of(graph, *[1] * 8), stream)
        copy_buffer(stream, b, c, 8, source_offset=4, destination_offset=16)
        graph.replay_on(inputs_of(graph, *[5] * 8), stream)
        assert c.floats.tolist() == [0, 0, 0, 0, 2, 2, 0, 0]
        assert tier.waited == [1]

    def test_a_copy_waits_for_an_event(self) -> None:
        tier, a, b, event = ListTier(), memory("a"), memory("b"), Event()
        stream = Stream(tier)
        stream.wait(event)
        copy_buffer(stream, a, b, 4)
        a.floats[:] = 7
        event.record(Stream(tier))
        assert b.floats[0] == 7

    def test_overlapping_ranges(self) -> None:
        a = memory("a")
        a.floats[:] = range(8)
        copy_buffer(Stream(ListTier()), a, a, 16, source_offset=0, destination_offset=8)
        assert a.floats.tolist() == [0, 1, 0, 1, 2, 3, 6, 7]

    @pytest.mark.parametrize(
        ("nbytes", "source", "target"), [(33, 0, 0), (4, 32, 0), (4, 0, 29), (4, -1, 0), (-1, 0, 0)]
    )
    def test_a_range_outside_the_buffer(self, nbytes: int, source: int, target: int) -> None:
        with pytest.raises(ExecutionError, match="outside"):
            copy_buffer(Stream(ListTier()), memory("a"), memory("b"), nbytes, source, target)
