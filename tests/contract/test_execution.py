"""Execution objects over a small tier: exact variants, ports, streams, events, plans, copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.dtypes import F32
from contract.errors import ExecutionError, MissingVariant
from contract.execution import Event, ExecutableGraph, Plan, Stream, VariantTable, copy_buffer
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.contract.list_tier import (
    ONE,
    TWO,
    WIDTH,
    Batch,
    ListTier,
    executable,
    memory,
    scale_graph,
)


class TestVariants:
    def test_replay_computes_on_the_bound_buffers(self) -> None:
        tier, a, b = ListTier(), memory("a"), memory("b")
        graph = executable(tier, "double", 2.0, a, b)
        a.floats[:] = range(8)
        graph.record(ONE)
        graph.record(TWO)
        graph.replay(ONE)
        assert b.floats.tolist() == [0, 2, 4, 6, 0, 0, 0, 0]
        fence = graph.replay(TWO)
        assert b.floats.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert fence.done

    def test_a_key_is_exact(self) -> None:
        """Neither a larger recorded variant nor another row count stands in for a missing one."""
        tier = ListTier()
        graph = executable(tier, "g", 2.0, memory("a"), memory("b"))
        graph.record(TWO)
        for key in (ONE, ShapeKey(2, 1)):
            assert not graph.has_variant(key)
            with pytest.raises(MissingVariant, match=r"graph g has no variant for ShapeKey"):
                graph.replay(key)
        with pytest.raises(MissingVariant):
            graph.replay_on(ONE, Stream(tier))
        assert tier.submitted == []

    def test_lowering_happens_once_a_record(self) -> None:
        tier = ListTier()
        graph = executable(tier, "g", 2.0, memory("a"), memory("b"))
        graph.record(ONE)
        for _ in range(5):
            graph.replay(ONE)
        assert tier.lowered == [ONE]
        assert len(tier.submitted) == 5

    def test_the_least_recently_used_variant_is_dropped(self) -> None:
        graph = executable(ListTier(), "g", 2.0, memory("a", 9), memory("b", 9), capacity=2)
        keys = [ShapeKey(n, 0) for n in (1, 2, 3)]
        graph.record(keys[0])
        graph.record(keys[1])
        graph.replay(keys[0])
        graph.record(keys[2])
        assert graph.keys == (keys[0], keys[2])
        with pytest.raises(MissingVariant):
            graph.replay(keys[1])

    @given(
        capacity=st.integers(1, 4),
        steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40),
    )
    def test_the_table_is_an_lru_of_exact_keys(
        self, capacity: int, steps: list[tuple[bool, int]]
    ) -> None:
        table = VariantTable(capacity)
        model: list[int] = []
        for put, n in steps:
            if put:
                table.put(ShapeKey(n, 0), Batch(scale_graph("g", 1.0), {}, ShapeKey(n, 0)))
            found = table.get(ShapeKey(n, 0))
            assert (found is not None) == (put or n in model)
            if found is not None:
                assert found.key == ShapeKey(n, 0)
                model = [*(m for m in model if m != n), n][-capacity:]
            assert table.keys == tuple(ShapeKey(m, 0) for m in model)

    def test_a_table_without_room(self) -> None:
        with pytest.raises(ValueError, match="capacity is 0"):
            VariantTable(0)


class TestPorts:
    def test_binding_another_buffer_drops_what_was_recorded(self) -> None:
        a, b, c = memory("a"), memory("b"), memory("c")
        graph = executable(ListTier(), "g", 2.0, a, b)
        graph.record(ONE)
        graph.bind("out", b)
        assert graph.has_variant(ONE)
        graph.bind("out", c)
        assert not graph.has_variant(ONE)
        a.floats[:] = 1
        graph.record(ONE)
        graph.replay(ONE)
        assert (b.floats.sum(), c.floats.sum()) == (0, 8)

    def test_graphs_are_wired_by_sharing_a_buffer(self) -> None:
        tier, a, shared, out = ListTier(), memory("a"), memory("shared"), memory("out")
        first = executable(tier, "first", 2.0, a, shared)
        second = executable(tier, "second", 3.0, shared, out)
        for graph in (first, second):
            graph.record(ONE)
        a.floats[:] = 1
        first.replay(ONE)
        second.replay(ONE)
        assert out.floats[:WIDTH].tolist() == [6.0] * WIDTH

    def test_changing_a_bound_buffers_contents_needs_no_record(self) -> None:
        a, b = memory("a"), memory("b")
        graph = executable(ListTier(), "g", 2.0, a, b)
        graph.record(ONE)
        for value in (1.0, 5.0):
            a.floats[:] = value
            graph.replay(ONE)
            assert b.floats[0] == 2 * value

    def test_an_unknown_port(self) -> None:
        graph = executable(ListTier(), "g", 2.0, memory("a"), memory("b"))
        with pytest.raises(ExecutionError, match="graph g has no port 'side'"):
            graph.bind("side", memory("c"))

    def test_scratch_is_no_port(self) -> None:
        b = GraphBuilder("g")
        x = b.buffer("in", BufferKind.REQUEST, F32, ("tokens", WIDTH))
        half = b.emit(Opcode.SCALE, "half", x=x, factor=0.5)
        b.emit(Opcode.SCALE, x=half, factor=0.5, y=b.output("out", "tokens", WIDTH))
        with pytest.raises(ExecutionError, match=r"no port 'scratch\.half'"):
            ExecutableGraph(ListTier(), b.build(), {half.buffer: memory("c")}, 1)

    def test_recording_with_an_unbound_port(self) -> None:
        graph = ExecutableGraph(ListTier(), scale_graph("g", 2.0), {"in": memory("a")}, 1)
        with pytest.raises(ExecutionError, match="port 'out' is not bound"):
            graph.record(ONE)

    def test_recording_a_key_the_buffers_cannot_hold(self) -> None:
        graph = executable(ListTier(), "g", 2.0, memory("a", 2), memory("b", 1))
        graph.record(ONE)
        with pytest.raises(ExecutionError, match=r"port 'out' needs 32 bytes .* has 16"):
            graph.record(TWO)


def named(tier: ListTier, name: str) -> ExecutableGraph:
    graph = executable(tier, name, 1.0, memory("a"), memory("b"))
    graph.record(ONE)
    return graph


class TestStreams:
    def test_an_event_holds_another_stream_back(self) -> None:
        tier = ListTier()
        first, second, event = Stream(tier), Stream(tier), Event()
        second.wait(event)
        named(tier, "late").replay_on(ONE, second)
        assert second.blocked
        assert tier.submitted == []
        named(tier, "early").replay_on(ONE, first)
        event.record(first)
        assert not second.blocked
        assert tier.submitted == ["early", "late"]

    def test_a_recorded_event_holds_nothing_back(self) -> None:
        tier = ListTier()
        stream, event = Stream(tier), Event()
        event.record(stream)
        stream.wait(event)
        named(tier, "g").replay_on(ONE, stream)
        assert tier.submitted == ["g"]

    def test_an_event_is_a_point_in_its_stream(self) -> None:
        """Recorded in a blocked stream, an event counts only once that stream gets there."""
        tier = ListTier()
        a, b, gate, event = Stream(tier), Stream(tier), Event(), Event()
        a.wait(gate)
        named(tier, "before").replay_on(ONE, a)
        event.record(a)
        b.wait(event)
        named(tier, "after").replay_on(ONE, b)
        assert not event.recorded
        gate.record(Stream(tier))
        assert event.recorded
        assert tier.submitted == ["before", "after"]

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
            named(tier, name).replay_on(ONE, stream)
        event.record(Stream(tier))
        assert tier.submitted == ["high", "low", "low too"]

    def test_synchronize_waits_for_the_last_submission(self) -> None:
        tier = ListTier()
        stream = Stream(tier)
        stream.synchronize()
        assert tier.waited == []
        for name in ("a", "b"):
            named(tier, name).replay_on(ONE, stream)
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
            name: plan.add(named(tier, name), ONE, streams[i % 3])
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
        source = plan.add(named(tier, "source"), ONE, stuck)
        sink = plan.add(named(tier, "sink"), ONE, free)
        plan.add(named(tier, "other"), ONE, Stream(tier))
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
            graph = executable(tier, str(i), 2.0, buffers[i], buffers[i + 1])
            graph.record(ONE)
            node = plan.add(graph, ONE, Stream(tier))
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
            plan.add(graph, ONE, Stream(tier))
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
        a, b, c = (plan.add(named(tier, name), ONE, Stream(tier)) for name in "abc")
        plan.after(b, a)
        plan.after(c, b)
        for before, after in ((c, a), (a, a), (b, a)):
            with pytest.raises(ExecutionError, match="cycle"):
                plan.after(after, before)

    def test_an_unknown_node(self) -> None:
        with pytest.raises(ExecutionError, match="no node 1"):
            Plan().after(1, 0)

    def test_a_missing_variant_is_found_before_anything_runs(self) -> None:
        tier = ListTier()
        plan = Plan()
        plan.add(named(tier, "ready"), ONE, Stream(tier))
        plan.add(named(tier, "not recorded"), TWO, Stream(tier))
        with pytest.raises(MissingVariant, match="not recorded"):
            plan.execute()
        assert tier.submitted == []


def _reaches(edges: list[tuple[int, int]], start: int, goal: int) -> bool:
    return start == goal or any(
        _reaches(edges, after, goal) for before, after in edges if before == start
    )


class TestCopy:
    def test_a_copy_keeps_its_place_in_the_stream(self) -> None:
        tier, a, b, c = ListTier(), memory("a"), memory("b"), memory("c")
        graph = executable(tier, "g", 2.0, a, b)
        graph.record(TWO)
        stream = Stream(tier)
        a.floats[:] = 1
        graph.replay_on(TWO, stream)
        copy_buffer(stream, b, c, 8, source_offset=4, destination_offset=16)
        a.floats[:] = 5
        graph.replay_on(TWO, stream)
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
