"""The records of the graph IR: an immutable list of opcodes over named buffers.

A graph says nothing about a particular step: the tokens, their positions, their KV pages and how to
sample are data in ``REQUEST`` buffers. Only two sizes vary, ``tokens`` and ``rows``. They are
symbols in the shapes and become numbers when a tier lowers the graph for one ShapeKey."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum

from contract.dtypes import DType
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from contract.spec import Dim, Scalar, Stage

IR_VERSION = 2
"""Version of the serialized records; a change of their meaning raises it."""

LAYER = re.compile(r"\[(\d+)\]")
"""Names of nodes and buffers of layer N contain ``[N]``."""


def layer_of(name: str) -> int | None:
    """The layer a name belongs to, or None for names outside the layers."""
    match = LAYER.search(name)
    return int(match.group(1)) if match else None


class BufferKind(IntEnum):
    """The writer of a buffer and the lifetime of its data."""

    WEIGHT = 1
    """Read-only tensor of the model file, given by ``source``."""
    CONSTANT = 2
    """Read-only table computed when the model is loaded (rotary angles)."""
    STATE = 3
    """Lives across steps: the KV pool, recurrent states, the output ring."""
    REQUEST = 4
    """Written by the host before every step."""
    SCRATCH = 5
    """Lives inside one step."""
    OUTPUT = 6
    """Read by the host after every step."""


@dataclass(frozen=True, slots=True)
class BufferDecl:
    """One named buffer. ``source`` says what a weight contains, see ``contract.ir.source``."""

    name: str
    kind: BufferKind
    dtype: DType
    shape: tuple[Dim, ...]
    source: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """A whole buffer, columns ``[start, stop)`` of its last axis, or the first ``rows`` rows of a
    weight matrix."""

    buffer: str
    columns: tuple[int, int] | None = None
    rows: int | None = None

    def shape(self, whole: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """The shape of what the view shows of a buffer of shape ``whole``."""
        if self.rows is not None:
            return (self.rows, *whole[1:])
        return whole if self.columns is None else (*whole[:-1], self.columns[1] - self.columns[0])

    def __getitem__(self, columns: slice) -> View:
        """Columns [start, stop) of a view of the whole buffer."""
        if self.columns is not None:
            raise IndexError(f"{self.buffer} is already sliced")
        return View(self.buffer, (int(columns.start), int(columns.stop)))


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: an opcode, its operands by name and its parameters by name."""

    name: str
    opcode: Opcode
    operands: Mapping[str, View]
    params: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Graph:
    """An immutable list of nodes in execution order. ``GraphBuilder.build`` verifies it."""

    name: str
    stage: Stage
    buffers: Mapping[str, BufferDecl]
    nodes: tuple[Node, ...]

    def shape(self, view: View) -> tuple[Dim, ...]:
        """The shape of the data a view shows."""
        return view.shape(self.buffers[view.buffer].shape)

    def of_kind(self, *kinds: BufferKind) -> tuple[BufferDecl, ...]:
        """The declarations of the given kinds, in order of declaration."""
        return tuple(b for b in self.buffers.values() if b.kind in kinds)

    @property
    def opcodes(self) -> frozenset[Opcode]:
        """The opcodes a tier must implement to run this graph."""
        return frozenset(node.opcode for node in self.nodes)
