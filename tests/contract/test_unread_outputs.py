"""Graphs without the nodes whose results nobody asks for."""

from dataclasses import replace

import numpy as np
import pytest

from contract.dtypes import F32
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import pack_inputs
from contract.ir.unread_outputs import kinds_of_steps, without_outputs
from contract.ir.verify import verify
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import HIDDEN, LOG_PROBABILITIES, ROW_DIGEST
from tests.contract.graphs import decoder

STEP = ShapeKey(2, 0)


def two_outputs() -> Graph:
    """``more`` is made of the result that ``less`` is, which is an output, too."""
    builder = GraphBuilder("g")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 4))
    less = builder.output("less", "tokens", 4)
    builder.emit(Opcode.SCALE, "less", x=x, factor=2.0, y=less)
    builder.emit(Opcode.SCALE, "more", x=less, factor=3.0, y=builder.output("more", "tokens", 4))
    return builder.build()


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_what_nobody_reads_goes_with_its_buffer():
    shorter = without_outputs(two_outputs(), ["more"])
    verify(shorter)
    assert names(shorter) == ["less"]
    assert set(shorter.buffers) == {"x", "less"}


@pytest.mark.parametrize("requested", [[], ["less"], ["unknown"]])
def test_what_a_node_reads_stays(requested):
    graph = two_outputs()
    assert without_outputs(graph, requested) is graph


def test_barriers_write_nothing_and_stay():
    graph = decoder()
    assert Opcode.BARRIER in graph.opcodes
    assert without_outputs(graph, LOG_PROBABILITIES) is graph


def test_listing_adds_nothing_but_what_can_be_left_out(tiny_model_path):
    """A model's graph with log-probabilities is, without them, the one that never had any."""
    limits = Limits(2, 64, 8, step_rows=2)
    model = open_model(tiny_model_path)
    with model.file:
        listing = model.graph(replace(limits, top_log_probabilities=3))
        shorter = without_outputs(listing, LOG_PROBABILITIES)
        assert Opcode.LOG_PROBABILITIES in listing.opcodes
        assert shorter == model.graph(limits)
        digesting = model.graph(replace(limits, digests=True))
        assert Opcode.ROW_DIGEST in digesting.opcodes
        shorter = without_outputs(digesting, [ROW_DIGEST])
        assert shorter.nodes == model.graph(limits).nodes
        both = model.graph(replace(limits, top_log_probabilities=3, digests=True))
        kinds = [kinds_of_steps(graph) for graph in (shorter, listing, digesting, both)]
        assert kinds == [1, 2, 2, 4]


def test_hidden_states_cost_only_the_steps_that_hand_them_over(tiny_model_path):
    limits = Limits(2, 64, 8, step_rows=2)
    model = open_model(tiny_model_path)
    with model.file:
        whole = model.graph(replace(limits, hidden_states=True))
        plain = model.graph(limits)
    shorter = without_outputs(whole, [HIDDEN])
    verify(shorter)
    assert HIDDEN in whole.buffers.keys() - shorter.buffers.keys()
    assert [node.opcode for node in shorter.nodes] == [node.opcode for node in plain.nodes]
    assert len(whole.nodes) == len(plain.nodes) + 1
    assert (kinds_of_steps(whole), kinds_of_steps(plain)) == (2, 1)


def test_a_seldom_group_is_lowered_ahead_by_itself_only():
    builder = GraphBuilder("g")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 4))
    for name in ("y", "one", "two", "rare"):
        builder.emit(Opcode.SCALE, name, x=x, factor=2.0, y=builder.output(name, "tokens", 4))
    graph = builder.build()
    with CpuTier() as tier:
        buffers = {decl.name: tier.alloc(decl, 32) for decl in graph.of_kind(BufferKind.OUTPUT)}
        executable = ExecutableGraph(tier, graph, buffers, STEP, [["one"], ["two"]], [["rare"]])
        executable.record(STEP)
        ahead = list(executable._batches.values())
        inputs = pack_inputs(executable.inputs, STEP, {"x": np.zeros((2, 4), np.float32)})
        for requested in ((), ("one",), ("two",), ("one", "two"), ("rare",), ("rare", "one")):
            batch = executable.batch(inputs, requested)
            assert batch.packets == 1 + len(requested)
            assert (batch in ahead) == (requested != ("rare", "one"))
            assert executable.batch(inputs, ("y", *requested)) is batch


@pytest.mark.parametrize("requested", [(), ("more",)])
def test_optional_outputs_are_made_for_who_wants_them(requested):
    """Whoever wants none has fewer packets, and the bytes of the output are not touched."""
    graph = two_outputs()
    with CpuTier() as tier:
        buffers = {decl.name: tier.alloc(decl, 32) for decl in graph.of_kind(BufferKind.OUTPUT)}
        executable = ExecutableGraph(tier, graph, buffers, STEP, [["more"]])
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        inputs = pack_inputs(executable.inputs, STEP, {"x": values})
        fence = executable.replay(inputs, requested)
        tier.wait(fence)
        assert executable.batch(inputs, requested).packets == 1 + len(requested)
        assert np.array_equal(tier.map(buffers["less"]).view(np.float32).reshape(2, 4), 2 * values)
        more = tier.map(buffers["more"]).view(np.float32).reshape(2, 4)
        assert np.array_equal(more, 6 * values if requested else 0 * values)
