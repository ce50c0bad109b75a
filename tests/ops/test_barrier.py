"""BARRIER: what was written in place before it is read after it, in one graph on every tier."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from contract.dtypes import I32
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Heap
from harness.tiers import TIERS, open_tier
from reference.ops.barrier import barrier
from tests.needs import need_device

SLOTS, WORDS = 3, 8


def store_then_load(guarded: bool) -> Graph:
    """Write a word of every slot and read it back within the step."""
    builder = GraphBuilder("store, load")
    table = builder.buffer("table", BufferKind.STATE, I32, (SLOTS, WORDS))
    slots, value = builder.request("slots", "rows"), builder.request("value", "rows")
    builder.emit(Opcode.STORE_REQUEST_STATE, slot_ids=slots, value=value, slot_table=table, field=5)
    if guarded:
        builder.barrier()
    builder.emit(
        Opcode.LOAD_REQUEST_STATE,
        slot_ids=slots,
        slot_table=table,
        value=builder.output("loaded", "rows", dtype=I32),
        field=5,
    )
    return builder.build()


@pytest.mark.parametrize("name", TIERS)
def test_read_after_the_barrier_sees_the_write(name: str) -> None:
    """The words come back."""
    graph = store_then_load(guarded=True)
    contents = {"slots": [2, 0], "value": [41, -3]}
    with need_device(partial(open_tier, name)) as tier:
        buffers = {
            decl.name: tier.alloc(decl, 4 * SLOTS * WORDS, Heap.HOST_VISIBLE)
            for decl in graph.buffers.values()
        }
        for operand, words in contents.items():
            tier.map(buffers[operand])[:8] = np.array(words, np.int32).view(np.uint8)
        tier.wait(tier.submit(tier.lower(graph, buffers, ShapeKey(2, 2))))
        assert tier.map(buffers["loaded"])[:8].view(np.int32).tolist() == [41, -3]


def test_graph_without_the_barrier_is_refused() -> None:
    """Negative control: the verifier sees the unguarded read."""
    with pytest.raises(VerifyError, match="barrier"):
        store_then_load(guarded=False)


def test_definition_computes_nothing() -> None:
    """There is nothing to return."""
    assert barrier() is None
