"""BARRIER: what was written in place before it is read after it, in one graph on every tier."""

from __future__ import annotations

import numpy as np
import pytest

from contract.dtypes import F32
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Heap
from harness.tiers import available_tiers, open_tier
from reference.ops.barrier import barrier

ROWS, WIDTH = 3, 8
STEP = ShapeKey(2, 2)


def store_then_load(guarded: bool) -> Graph:
    """Write rows of a table and read them back within the step."""
    builder = GraphBuilder("store, load")
    table = builder.buffer("table", BufferKind.STATE, F32, (ROWS, WIDTH))
    rows = builder.buffer("rows", BufferKind.WEIGHT, F32, (ROWS, WIDTH))
    pairs = builder.request("pairs", "rows", 2)
    builder.emit(Opcode.COPY_ROWS, source=rows, pairs=pairs, target=table)
    if guarded:
        builder.barrier()
    builder.emit(
        Opcode.SELECT_ROWS,
        x=table,
        output_rows=builder.request("wanted", "rows"),
        y=builder.output("loaded", "rows", WIDTH),
    )
    return builder.build()


@pytest.mark.parametrize("name", available_tiers())
def test_read_after_the_barrier_sees_the_write(name: str) -> None:
    """The rows come back."""
    graph = store_then_load(guarded=True)
    layout = input_layout(graph, STEP)
    values = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    pairs = np.array([[2, 0], [0, 1]], np.int32)
    inputs = pack_inputs(layout, STEP, {"pairs": pairs, "wanted": np.array([1, 0], np.int32)})
    with open_tier(name) as tier:
        buffers = {
            decl.name: tier.alloc(decl, buffer_bytes(decl, STEP), Heap.DEVICE_LOCAL)
            for decl in graph.of_kind(BufferKind.STATE, BufferKind.OUTPUT)
        }
        buffers["rows"] = tier.upload(graph.buffers["rows"], values.view(np.uint8))
        fence = tier.submit(tier.lower(graph, buffers, STEP, layout), inputs, ["loaded"])
        tier.wait(fence)
        loaded = fence.outputs["loaded"].view(np.float32).reshape(2, WIDTH)
        assert (loaded == values[[0, 2]]).all()


def test_graph_without_the_barrier_is_refused() -> None:
    """Negative control: the verifier sees the unguarded read."""
    with pytest.raises(VerifyError, match="barrier"):
        store_then_load(guarded=False)


def test_definition_computes_nothing() -> None:
    """There is nothing to return."""
    assert barrier() is None
