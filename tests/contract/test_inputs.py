"""A step's inputs as one block: where each buffer lies, and what comes back out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.dtypes import F32, I32
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import STEP_BUFFER, InputCopy, InputRows, input_layout, pack_inputs, step_of
from contract.ir.scratch import ALIGNMENT, buffer_bytes
from contract.opcodes import Opcode
from contract.records import STEP
from contract.shape_key import ShapeKey


def graph_of(widths: list[int], symbols: list[str]) -> Graph:
    """Sums of request buffers, one after the other, and the STEP record among them."""
    b = GraphBuilder("sums")
    total = None
    for index, (width, symbol) in enumerate(zip(widths, symbols, strict=True)):
        x = b.buffer(f"request.{index}", BufferKind.REQUEST, F32, (symbol, width))
        y = b.emit(Opcode.SCALE, x=x, factor=1.0) if symbol == "tokens" else None
        total = y or total
    b.request(STEP_BUFFER, 1, 4)
    q = b.request("request.query", "tokens", 4)
    table = b.buffer("table", BufferKind.WEIGHT, F32, (3, 8))
    b.emit(Opcode.EMBED, query=q, table=table, y=b.output("y", "tokens", 8))
    return b.build()


sizes = st.lists(st.tuples(st.integers(1, 300), st.sampled_from(("tokens", "rows"))), max_size=5)
steps = st.builds(ShapeKey, st.integers(0, 40), st.integers(0, 40))


@given(sizes, steps)
def test_buffers_are_apart_and_aligned(buffers, largest):
    """The STEP record comes first, every buffer has room for the largest step, none overlap."""
    graph = graph_of([width for width, _ in buffers], [symbol for _, symbol in buffers])
    layout = input_layout(graph, largest)
    assert layout.offsets[STEP_BUFFER] == 0
    end = STEP.itemsize
    for decl in graph.of_kind(BufferKind.REQUEST):
        if decl.name != STEP_BUFFER:
            start = layout.offsets[decl.name]
            assert start >= end
            assert start % ALIGNMENT == 0
            end = start + buffer_bytes(decl, largest)
    assert end <= layout.nbytes


@given(sizes, steps, st.integers(0, 2**32 - 1))
def test_what_is_packed_can_be_read(buffers, step, first_event):
    graph = graph_of([width for width, _ in buffers], [symbol for _, symbol in buffers])
    largest = ShapeKey(40, 40)
    layout = input_layout(graph, largest)
    rng = np.random.default_rng(1)
    arrays = {
        decl.name: rng.integers(0, 256, buffer_bytes(decl, step), np.uint8)
        for decl in graph.of_kind(BufferKind.REQUEST)
        if decl.name != STEP_BUFFER
    }
    block = pack_inputs(layout, step, arrays, first_event)
    assert step_of(block) == step
    assert block[: STEP.itemsize].view(STEP)["first_event"][0] == first_event
    for name, array in arrays.items():
        start = layout.offsets[name]
        assert (block[start : start + array.nbytes] == array).all()


def test_a_buffer_the_graph_lacks():
    layout = input_layout(graph_of([], []), ShapeKey(1, 1))
    with pytest.raises(KeyError, match=r"request\.page_table"):
        pack_inputs(layout, ShapeKey(1, 1), {"request.page_table": np.zeros(1, np.int32)})


def test_the_record_is_four_words():
    """What a kernel reads as int32 words, whatever the rest of the block."""
    assert STEP.itemsize == I32.block_bytes * 4
    assert list(STEP.names or ()) == ["tokens", "rows", "first_event", "reserved"]


ROWS = InputRows(start=24, row_bytes=8, versions=np.zeros(5, np.int64))


class Block:
    """A block of inputs with a table of five rows in its middle, written to as a runner does."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.data = self.random.integers(0, 256, 100, np.uint8)
        self.rows = InputRows(ROWS.start, ROWS.row_bytes, np.zeros(5, np.int64))
        self.changes = 0

    def write(self, row: int, *, reported: bool = True) -> None:
        """Change a row, and everything outside the table."""
        table = self.rows.of(self.data).copy()
        self.data[:] = self.random.integers(0, 256, 100, np.uint8)
        table[row] = self.random.integers(0, 256, 8, np.uint8)
        self.rows.of(self.data)[:] = table
        self.changes += 1
        if reported:
            self.rows.versions[row] = self.changes


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 2), st.booleans()),
        max_size=60,
    )
)
def test_a_copy_is_the_block_however_long_ago_it_was_made(steps):
    """Three copies, each used now and then, of two blocks, sometimes without the rows."""
    blocks = [Block(seed) for seed in range(2)]
    copies = [InputCopy(np.zeros(120, np.uint8)) for _ in range(3)]
    for number, row, target, with_rows in steps:
        block, copy = blocks[number], copies[target]
        block.write(row)
        copy.update(block.data, block.rows if with_rows else None)
        assert (copy.data[:100] == block.data).all()


def test_a_row_that_did_not_change_is_not_copied():
    """Versions decide: a change without a new version is not copied."""
    block, copy = Block(1), InputCopy(np.zeros(100, np.uint8))
    copy.update(block.data, block.rows)
    block.write(2, reported=False)
    copy.update(block.data, block.rows)
    different = copy.data != block.data
    assert block.rows.of(different)[2].any()
    block.rows.of(different)[2] = False
    assert not different.any()
