"""The IR's records: a static graph of opcodes over named buffers, immutable once built.

Nothing about a step is in a graph: which tokens, at which positions, in which pages, sampled how,
is data in ``REQUEST`` buffers. The two sizes that do vary, ``tokens`` and ``rows``, are symbols in
the shapes and become numbers when a tier lowers the graph for one ShapeKey.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum

from contract.dtypes import DType
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from contract.spec import Dim, Scalar, Stage

IR_VERSION = 2
"""Version of the records below as serialized; a change of meaning raises it."""

LAYER = re.compile(r"\[(\d+)\]")
"""Node and buffer labels of layer N carry ``[N]``."""


def layer_of(name: str) -> int | None:
    """The layer a label belongs to, or None for what is outside the layers."""
    match = LAYER.search(name)
    return int(match.group(1)) if match else None


class BufferKind(IntEnum):
    """Who owns a buffer and how long it lives."""

    WEIGHT = 1
    """Read-only tensor of the model file, named by ``source``."""
    CONSTANT = 2
    """Read-only table computed at load (rotary angles)."""
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
    """One logical buffer. ``source`` says what a weight holds, see ``contract.ir.source``."""

    name: str
    kind: BufferKind
    dtype: DType
    shape: tuple[Dim, ...]
    source: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """A buffer, or the columns ``[start, stop)`` of its last axis."""

    buffer: str
    columns: tuple[int, int] | None = None

    def __getitem__(self, columns: slice) -> View:
        """``view[start:stop]``: a slice of the last axis of the whole buffer."""
        if self.columns is not None:
            raise IndexError(f"{self.buffer} is already sliced")
        return View(self.buffer, (int(columns.start), int(columns.stop)))


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: an opcode, its operands by name, its parameters by name."""

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
        """The shape a node sees through ``view``."""
        shape = self.buffers[view.buffer].shape
        if view.columns is None:
            return shape
        return (*shape[:-1], view.columns[1] - view.columns[0])

    def of_kind(self, *kinds: BufferKind) -> tuple[BufferDecl, ...]:
        """Declarations of the given kinds, in order of declaration."""
        return tuple(b for b in self.buffers.values() if b.kind in kinds)

    @property
    def opcodes(self) -> frozenset[Opcode]:
        """The opcodes a tier must have to run this graph."""
        return frozenset(node.opcode for node in self.nodes)
