"""Copies of rows of device buffers to host memory and back, in the queue of steps.

A row number stands for one row of each of several buffers. Stored bytes are copied without
conversion."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from contract.arrays import Bytes
from contract.dtypes import F32
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.ir.inputs import InputLayout, input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, LendsInputs, Tier

PAIRS = "request.pairs"
SAVED = "saved"
"""The output with a row's bytes: the bytes of each buffer in order."""
ONE_ROW = ShapeKey(0, 1)
LOADS_IN_FLIGHT = 8
"""The most loads of single rows in flight: the tier has a snapshot of each row."""
BLOCK_BYTES, BLOCK_ROWS = 16 << 20, 16
"""The most bytes and rows of a block: rows that one submission loads."""
BLOCK_LOADS_IN_FLIGHT = 2
"""The most loads of blocks in flight."""


class Saved(Protocol):
    """A row in host memory."""

    def bytes(self) -> Bytes:
        """The row's bytes, buffer after buffer."""


class HostBytes:
    """A row whose bytes are in host memory."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def bytes(self) -> Bytes:
        """The bytes."""
        return self._data


class SavedPage:
    """A row in host memory, or being copied to it."""

    def __init__(self, tier: Tier, fence: Fence) -> None:
        self._tier = tier
        self._fence: Fence | None = fence
        self._bytes: Bytes = np.empty(0, np.uint8)

    def bytes(self) -> Bytes:
        """The row's bytes, buffer after buffer. Waits for the copy, but for nothing submitted
        later."""
        if self._fence is not None:
            self._tier.wait(self._fence)
            self._bytes, self._fence = self._fence.outputs[SAVED], None
        return self._bytes


class RowBlock:
    """Host memory for the ``rows`` of one load, uint8[bytes of a row] each, within its ``inputs``,
    which the ``tier`` lends if it can."""

    def __init__(self, tier: Tier, layout: InputLayout, rows: int, row_bytes: int) -> None:
        nbytes = layout.nbytes
        self.inputs: Bytes = (
            tier.lend_inputs(nbytes)
            if isinstance(tier, LendsInputs)
            else np.empty(nbytes, np.uint8)
        )
        start = layout.offsets[SAVED]
        whole = self.inputs[start : start + rows * row_bytes]
        self.rows: Sequence[Bytes] = list(whole.reshape(rows, row_bytes))


class RowCopies:
    """Saves and loads rows of ``buffers``, each F32[rows, its width in ``widths``].

    Every copy is a submission like a step. A call waits in two cases only: for a row that is loaded
    while it is still being saved, and for the oldest load if LOADS_IN_FLIGHT are in flight. All
    graphs are lowered in the constructor."""

    NOUN: ClassVar[str] = "row"

    def __init__(
        self, tier: Tier, buffers: Mapping[str, Buffer], widths: Mapping[str, int], rows: int
    ) -> None:
        self.rows = rows
        self.row_bytes = sum(widths.values()) * F32.block_bytes
        """Bytes of one row in all buffers."""
        self._tier = tier
        self._widths = widths
        self._executables: list[ExecutableGraph] = []
        saving = _saving(widths, rows)
        staging = saving.buffers[SAVED]
        self._staging = tier.alloc(staging, buffer_bytes(staging, ONE_ROW))
        self._save = self._lowered(saving, {**buffers, SAVED: self._staging})
        self._load = self._lowered(_loading(widths, rows), buffers)
        self._buffers = buffers
        self._load_rows: ExecutableGraph | None = None
        self._last: Fence | None = None
        # A block is kept until the device has read it.
        self._loads: deque[tuple[Fence, RowBlock | None]] = deque()

    @cached_property
    def block_rows(self) -> int:
        """The number of rows in a block."""
        return max(1, min(BLOCK_ROWS, BLOCK_BYTES // self.row_bytes))

    @cached_property
    def _layout(self) -> InputLayout:
        return input_layout(_loading(self._widths, self.rows), ShapeKey(0, self.block_rows))

    def save(self, row: int) -> SavedPage:
        """Queue a copy of ``row`` to host memory. The row may be overwritten at once."""
        return SavedPage(self._tier, self._run(self._save, [(row, 0)], requested=(SAVED,)))

    def load(self, saved: Saved, row: int) -> None:
        """Queue a copy of a saved row into ``row``, for any step submitted from now on."""
        self._begin_load(LOADS_IN_FLIGHT)
        self._loads.append((self._run(self._load, [(0, row)], [saved]), None))

    def load_all(self, saved: Sequence[Saved], rows: Sequence[int]) -> None:
        """``load`` for each of several rows, in fewer submissions."""
        for first in range(0, len(rows), self.block_rows):
            block, part = self.block(), rows[first : first + self.block_rows]
            for memory, one in zip(block.rows, saved[first : first + len(part)], strict=False):
                memory[:] = one.bytes()
            self.load_block(block, enumerate(part))

    def block(self) -> RowBlock:
        """Memory for ``block_rows`` rows. Any thread may call this."""
        return RowBlock(self._tier, self._layout, self.block_rows, self.row_bytes)

    def load_block(self, block: RowBlock, pairs: Iterable[tuple[int, int]]) -> Fence:
        """Queue copies of rows of ``block`` into rows of the buffers, (number in the block, row)
        each, for any step submitted from now on. The block may be refilled once the returned fence
        is done."""
        if self._load_rows is None:
            graph = _loading(self._widths, self.rows)
            self._load_rows = self._lowered(graph, self._buffers, ShapeKey(0, self.block_rows))
        self._begin_load(BLOCK_LOADS_IN_FLIGHT)
        fence = self._run(self._load_rows, list(pairs), block=block.inputs)
        self._loads.append((fence, block))
        return fence

    def wait(self, fence: Fence) -> None:
        """Wait for a load."""
        self._tier.wait(fence)

    def close(self) -> None:
        """Wait for the last copy and free the staging buffer."""
        if self._last is not None:
            self._tier.wait(self._last)
            self._last = None
        self._loads.clear()
        for executable in self._executables:
            executable.close()
        self._buffers = {}
        self._tier.free(self._staging)

    def _begin_load(self, limit: int) -> None:
        """Wait until fewer than ``limit`` loads are in flight."""
        while len(self._loads) >= limit:
            self._tier.wait(self._loads.popleft()[0])

    def _lowered(
        self, graph: Graph, buffers: Mapping[str, Buffer], largest: ShapeKey = ONE_ROW
    ) -> ExecutableGraph:
        executable = ExecutableGraph(self._tier, graph, buffers, largest)
        for bucket in executable.buckets:
            executable.record(bucket)
        self._executables.append(executable)
        return executable

    def _run(
        self,
        graph: ExecutableGraph,
        pairs: Sequence[tuple[int, int]],
        saved: Sequence[Saved] = (),
        requested: tuple[str, ...] = (),
        block: Bytes | None = None,
    ) -> Fence:
        """Submit copies of ``pairs``, (source, target) each; a load has ``saved`` sources, or those
        in ``block``."""
        for index in {index for pair in pairs for index in pair}:
            assert 0 <= index < self.rows, f"{self.NOUN} {index} is not one of {self.rows}"
        step = ShapeKey(0, len(pairs))
        arrays = {PAIRS: np.array(pairs, np.int32)}
        block = pack_inputs(graph.inputs, step, arrays, block=block)
        for number, row in enumerate(saved):
            start = graph.inputs.offsets[SAVED] + number * self.row_bytes
            block[start : start + self.row_bytes] = row.bytes()
        self._last = graph.replay(block, requested)
        return self._last


End = tuple[Callable[[str], str], int]
"""Where rows are copied from or to: the name of each buffer by that of its copy, and its rows."""


def copying(name: str, widths: Mapping[str, int], source: End, target: End) -> Graph:
    """The graph ``name`` that copies a row between two buffers for each of ``widths``."""
    builder = GraphBuilder(name)
    pairs = builder.request(PAIRS, "rows", 2)
    for of, width in widths.items():
        views = [
            builder.buffer(named(of), BufferKind.STATE, F32, (rows, width))
            for named, rows in (source, target)
        ]
        builder.emit(Opcode.COPY_ROWS, of, source=views[0], pairs=pairs, target=views[1])
    return builder.build()


def _saving(widths: Mapping[str, int], rows: int) -> Graph:
    """The graph that copies one row of every buffer to an output of the step."""
    builder = GraphBuilder("save rows")
    pairs = builder.request(PAIRS, "rows", 2)
    parts = _parts(builder.output(SAVED, "rows", sum(widths.values())), widths)
    for name, width in widths.items():
        source = builder.buffer(name, BufferKind.STATE, F32, (rows, width))
        builder.emit(Opcode.COPY_ROWS, name, source=source, pairs=pairs, target=parts[name])
    return builder.build()


def _loading(widths: Mapping[str, int], rows: int) -> Graph:
    """The graph that copies one row of every buffer from the inputs of the submission."""
    builder = GraphBuilder("load rows")
    pairs = builder.request(PAIRS, "rows", 2)
    saved = builder.buffer(SAVED, BufferKind.REQUEST, F32, ("rows", sum(widths.values())))
    parts = _parts(saved, widths)
    for name, width in widths.items():
        target = builder.buffer(name, BufferKind.STATE, F32, (rows, width))
        builder.emit(Opcode.COPY_ROWS, name, source=parts[name], pairs=pairs, target=target)
    return builder.build()


def _parts(row: View, widths: Mapping[str, int]) -> dict[str, View]:
    """The columns of each buffer in the bytes of a row."""
    stops = np.cumsum(list(widths.values())).tolist()
    return {
        name: row[stop - width : stop]
        for (name, width), stop in zip(widths.items(), stops, strict=True)
    }
