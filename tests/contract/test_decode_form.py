"""The decode form: which steps have it, that it verifies, and that every tier executes the same."""

from collections.abc import Callable

import pytest

from accel.packets import rules
from accel.packets.rules import lower_graph
from contract.ir.decode_form import decode_form
from contract.ir.graph import Graph
from contract.ir.inputs import input_layout
from contract.ir.nodes import BufferKind
from contract.ir.scratch import buffer_bytes
from contract.ir.verify import verify
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.spec import Stage
from reference.cpu.tier import CpuTier
from tests.contract.graphs import decoder
from tests.contract.model_graphs import hybrid, slider

ONE = ShapeKey(1, 1)
LARGER = (ShapeKey(0, 1), ShapeKey(2, 1), ShapeKey(2, 2), ShapeKey(64, 3))
GRAPHS: tuple[Callable[[], Graph], ...] = (decoder, slider, hybrid)


@pytest.mark.parametrize("make", GRAPHS)
def test_a_step_of_one_token_says_flash_attn(make):
    """Each attention node, under its name; the graph serves decode alone then, and verifies."""
    graph = make()
    found = decode_form(graph, ONE)
    verify(found)
    assert found.stage is Stage.DECODE
    assert Opcode.FLASH_ATTN_BATCHED in graph.opcodes
    assert Opcode.FLASH_ATTN_BATCHED not in found.opcodes
    changed = {Opcode.FLASH_ATTN_BATCHED: Opcode.FLASH_ATTN}
    for before, after in zip(graph.nodes, found.nodes, strict=True):
        assert after.name == before.name
        assert after.opcode is changed.get(before.opcode, before.opcode)
        assert (after.operands, after.params) == (before.operands, before.params)
    assert found.buffers == graph.buffers


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("bucket", LARGER, ids=str)
def test_other_steps_are_as_the_family_wrote_them(make, bucket):
    """Two tokens may be of one slot."""
    graph = make()
    assert decode_form(graph, bucket) is graph


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("parts", [1, 8])
def test_packet_tiers_execute_the_same_operations(make, parts, monkeypatch):
    """Op for op what the graph as it was written is lowered to."""
    graph = make()
    lowered = lower_graph(graph, ONE, parts, "opencl")
    monkeypatch.setattr(rules, "decode_form", lambda graph, bucket: graph)
    as_written = lower_graph(graph, ONE, parts, "opencl")
    assert list(lowered.ops) == list(as_written.ops)


def test_the_cpu_tier_lowers_it():
    """The tier of definitions executes the graph as it was written: it is the oracle."""
    graph = decoder()
    for definitions_only, opcode in ((False, Opcode.FLASH_ATTN), (True, Opcode.FLASH_ATTN_BATCHED)):
        with CpuTier(1, definitions_only=definitions_only) as tier:
            kept = [
                decl
                for decl in graph.buffers.values()
                if decl.kind not in (BufferKind.SCRATCH, BufferKind.REQUEST)
            ]
            buffers = {decl.name: tier.alloc(decl, buffer_bytes(decl, ONE)) for decl in kept}
            batch = tier.lower(graph, buffers, ONE, input_layout(graph, ONE))
            attention = {Opcode.FLASH_ATTN, Opcode.FLASH_ATTN_BATCHED} & batch.graph.opcodes
            assert attention == {opcode}
