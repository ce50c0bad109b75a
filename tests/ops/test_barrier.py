"""BARRIER: what was written in place before it is read after it, in one graph on every tier."""

from functools import partial

import numpy as np
import pytest

from contract.dtypes import F32
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from harness.tiers import TIERS, open_tier
from reference.ops.barrier import barrier
from tests.needs import need_device
from tests.run_graph import run_graph

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
        output_rows=builder.request("selected", "rows"),
        y=builder.output("loaded", "rows", WIDTH),
    )
    return builder.build()


@pytest.mark.parametrize("name", TIERS)
def test_read_after_the_barrier_sees_the_write(name):
    """The rows come back."""
    values = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    contents = {
        "rows": values,
        "pairs": np.array([[2, 0], [0, 1]], np.int32),
        "selected": np.array([1, 0], np.int32),
    }
    with need_device(partial(open_tier, name)) as tier:
        loaded = run_graph(tier, store_then_load(guarded=True), STEP, contents)["loaded"]
    assert (loaded.view(np.float32).reshape(2, WIDTH) == values[[0, 2]]).all()


def test_graph_without_the_barrier_is_refused():
    """Negative control: the verifier sees the unguarded read."""
    with pytest.raises(VerifyError, match="barrier"):
        store_then_load(guarded=False)


def test_definition_computes_nothing():
    """There is nothing to return."""
    assert barrier() is None
