"""A step's inputs as one block of bytes: its STEP record (``contract.records``), then every REQUEST
buffer.

So one copy gives a tier its snapshot of the inputs, whatever inputs a graph declares."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Array, Bytes
from contract.ir.nodes import BufferKind, Graph
from contract.ir.scratch import ALIGNMENT, buffer_bytes
from contract.lazy_dataclass import dataclass
from contract.records import STEP
from contract.shape_key import ShapeKey

_STEP_COUNTS, _STEP = struct.Struct("<ii"), struct.Struct("<iiII")
"""The first two fields of STEP, tokens and rows, and all: numpy takes microseconds for a record."""
FEW_ROWS = 64
"""Largest table whose versions are compared one by one."""
STEP_BUFFER = "request.step"
"""The REQUEST buffer, int32 [1, 4], through which a node reads the STEP record."""


@dataclass(frozen=True, slots=True)
class InputLayout:
    """The layout of a step's inputs: byte offsets of REQUEST buffers in a block of ``nbytes``.

    The STEP record is at offset 0."""

    offsets: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class InputRows:
    """A table in a block of inputs (the page table) of which few rows change from step to step.

    It begins at byte ``start`` and each row has ``row_bytes``. ``versions``, int64 [rows], numbers
    the latest change of each row; every change of any row gets a higher number than all before."""

    start: int
    row_bytes: int
    versions: NDArray[np.int64]

    @property
    def latest(self) -> int:
        """The number of the latest change of any row. A list of few is faster than an array."""
        versions = self.versions
        return max(versions.tolist()) if len(versions) <= FEW_ROWS else int(versions.max())

    def of(self, block: Bytes) -> Bytes:
        """The table in ``block``, as uint8 [rows, row_bytes]."""
        stop = self.start + self.row_bytes * len(self.versions)
        return block[self.start : stop].reshape(-1, self.row_bytes)


class LentBlock(np.ndarray[Any, np.dtype[np.uint8]]):
    """A block of inputs in memory of a tier, see ``contract.tier.LendsInputs``."""


class InputCopy:
    """A tier's copy ``data`` of a step's inputs, which each step overwrites. When the versions of a
    table's rows are given, only rows that changed since the last update are copied."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self._rows: InputRows | None = None
        self._version = 0

    def update(self, inputs: Bytes, rows: InputRows | None = None) -> None:
        """Copy ``inputs`` to ``data``. If ``rows`` is the same object as in the last call, rows of
        its table that did not change are skipped."""
        latest = 0 if rows is None else rows.latest
        if rows is None or rows is not self._rows:
            self.data[: len(inputs)] = inputs
        else:
            source, target = rows.of(inputs), rows.of(self.data)
            stop = rows.start + source.nbytes
            self.data[: rows.start] = inputs[: rows.start]
            self.data[stop : len(inputs)] = inputs[stop:]
            if latest > self._version:
                changed = (rows.versions > self._version).nonzero()[0]
                target[changed] = source[changed]
        self._rows, self._version = rows, latest


def input_layout(graph: Graph, largest: ShapeKey) -> InputLayout:
    """The layout of the inputs of all steps of ``graph`` up to ``largest``."""
    offsets = {}
    end = _aligned(STEP.itemsize)
    for decl in graph.of_kind(BufferKind.REQUEST):
        if decl.name == STEP_BUFFER:
            offsets[decl.name] = 0
            continue
        offsets[decl.name] = end
        end += _aligned(buffer_bytes(decl, largest))
    return InputLayout(MappingProxyType(offsets), end)


def pack_inputs(
    layout: InputLayout,
    step: ShapeKey,
    arrays: Mapping[str, Array],
    first_event: int = 0,
    block: Bytes | None = None,
) -> Bytes:
    """Write the inputs of a step to ``block`` uint8[layout.nbytes], or to a new one; returns it.

    They are the STEP record, of the counts in ``step`` and the number ``first_event`` of the step's
    first event, and the bytes of ``arrays``, by the names of REQUEST buffers. Raises KeyError for a
    buffer the layout does not have."""
    block = np.zeros(layout.nbytes, np.uint8) if block is None else block
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = layout.offsets[name]
        block[start : start + data.nbytes] = data
    put_step(block, step.tokens, step.rows, first_event)
    return block


def put_step(block: Bytes, tokens: int, rows: int, first_event: int) -> None:
    """Write the STEP record of a block."""
    _STEP.pack_into(block.data, 0, tokens, rows, first_event, 0)


def step_of(block: Bytes) -> ShapeKey:
    """The numbers of tokens and rows in a block's STEP record."""
    return ShapeKey(*_STEP_COUNTS.unpack_from(block.data))


def counts_of(block: Bytes) -> bytes:
    """The same as bytes, which are compared faster."""
    return block[: _STEP_COUNTS.size].tobytes()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
