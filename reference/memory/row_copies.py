"""Copies of rows of device buffers to host memory and back, in the queue of steps.

A row number stands for one row of each of several buffers. Stored bytes are copied without
conversion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.ir.inputs import pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, Tier

PAIRS = "request.pairs"
SAVED = "saved"
"""The output with a row's bytes: its part of each buffer, in the order of the buffers."""
ONE_ROW = ShapeKey(0, 1)
LOADS_UNDER_WAY = 8
"""The most loads of rows in flight: the tier has a snapshot of each row."""


class Saved(Protocol):
    """A row in host memory."""

    def bytes(self) -> NDArray[np.uint8]:
        """The row's bytes, buffer after buffer."""


class SavedPage:
    """A row in host memory, or being copied to it."""

    def __init__(self, tier: Tier, fence: Fence) -> None:
        self._tier = tier
        self._fence: Fence | None = fence
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)

    def bytes(self) -> NDArray[np.uint8]:
        """The row's bytes, buffer after buffer. Waits for the copy, but for nothing submitted
        later."""
        if self._fence is not None:
            self._tier.wait(self._fence)
            self._bytes, self._fence = self._fence.outputs[SAVED], None
        return self._bytes


class RowCopies:
    """Saves and loads rows of ``buffers``, each F32[rows, its width in ``widths``].

    Every copy is a submission like a step. A call waits in two cases only: for a row that is loaded
    while it is still being saved, and for the oldest load when LOADS_UNDER_WAY are in flight. All
    graphs are lowered here.
    """

    NOUN: ClassVar[str] = "row"

    def __init__(
        self, tier: Tier, buffers: Mapping[str, Buffer], widths: Mapping[str, int], rows: int
    ) -> None:
        self.rows = rows
        self._tier = tier
        self._widths = widths
        saving = _saving(widths, rows)
        staging = saving.buffers[SAVED]
        self._staging = tier.alloc(staging, buffer_bytes(staging, ONE_ROW))
        self._save = self._lowered(saving, {**buffers, SAVED: self._staging})
        self._load = self._lowered(_loading(widths, rows), buffers)
        self._last: Fence | None = None
        self._loads: deque[Fence] = deque()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all buffers."""
        return sum(self._widths.values()) * F32.block_bytes

    def save(self, row: int) -> SavedPage:
        """Queue: what is in ``row`` now into host memory. The row may be written at once."""
        fence = self._last = self._run(self._save, row, 0, requested=(SAVED,))
        return SavedPage(self._tier, fence)

    def load(self, saved: Saved, row: int) -> None:
        """Queue: what was saved into ``row``, for any step submitted from now on."""
        if len(self._loads) == LOADS_UNDER_WAY:
            self._tier.wait(self._loads.popleft())
        self._last = self._run(self._load, 0, row, saved.bytes())
        self._loads.append(self._last)

    def close(self) -> None:
        """Wait for the last copy and free the staging buffer."""
        if self._last is not None:
            self._tier.wait(self._last)
            self._last = None
        self._loads.clear()
        self._tier.free(self._staging)

    def _lowered(self, graph: Graph, buffers: Mapping[str, Buffer]) -> ExecutableGraph:
        executable = ExecutableGraph(self._tier, graph, buffers, ONE_ROW)
        for bucket in executable.buckets:
            executable.record(bucket)
        return executable

    def _run(
        self,
        graph: ExecutableGraph,
        source: int,
        target: int,
        data: NDArray[np.uint8] | None = None,
        requested: tuple[str, ...] = (),
    ) -> Fence:
        for row in (source, target):
            assert 0 <= row < self.rows, f"{self.NOUN} {row} is not one of {self.rows}"
        arrays: dict[str, NDArray[Any]] = {PAIRS: np.array([[source, target]], np.int32)}
        if data is not None:
            arrays[SAVED] = data
        return graph.replay(pack_inputs(graph.inputs, ONE_ROW, arrays), requested)


def copying(widths: Mapping[str, int], rows: int, source_of: Mapping[str, str]) -> Graph:
    """The graph that copies one row of every buffer to another row of the same buffer, which is
    also bound under the name in ``source_of``."""
    builder = GraphBuilder("copy rows")
    pairs = builder.request(PAIRS, "rows", 2)
    for name, width in widths.items():
        source = builder.buffer(source_of[name], BufferKind.STATE, F32, (rows, width))
        target = builder.buffer(name, BufferKind.STATE, F32, (rows, width))
        builder.emit(Opcode.COPY_ROWS, name, source=source, pairs=pairs, target=target)
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
