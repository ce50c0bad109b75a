"""Buffers of graphs in device memory, for every tier of packets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from accel.packets.layouts import WeightLayout
from contract.arrays import Bytes
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.lazy_dataclass import dataclass


class Allocation(Protocol):
    """Bytes in device memory."""

    nbytes: int

    @property
    def address(self) -> int:
        """The address of the first byte, as packets contain it."""


A = TypeVar("A", bound=Allocation)


@dataclass(frozen=True, slots=True)
class ArrangedMatrix(Generic[A]):
    """A weight in the layout that products read. ``row_bytes`` is the stride in bytes: of a row if
    the weight is stored as in the file, else of a group of rows."""

    allocation: A
    row_bytes: int
    layout: WeightLayout

    @property
    def operand(self) -> tuple[int, int, WeightLayout]:
        """The address, stride and layout that a packet contains."""
        return self.allocation.address, self.row_bytes, self.layout


@dataclass(slots=True, eq=False)
class DeviceBuffer(Generic[A]):
    """Device memory of one graph buffer.

    A weight has ``matrix``, memory in the layout of products, ``allocation``, memory in the
    declared layout, or both if ops read both. ``source`` is the host's view of its stored bytes."""

    decl: BufferDecl
    nbytes: int
    allocation: A | None = None
    source: Bytes | None = None
    matrix: ArrangedMatrix[A] | None = None

    @property
    def name(self) -> str:
        """The name of the graph buffer."""
        return self.decl.name

    @property
    def allocations(self) -> list[A]:
        """All device memory of the buffer."""
        matrix = self.matrix.allocation if self.matrix is not None else None
        return list({id(a): a for a in (self.allocation, matrix) if a is not None}.values())

    @property
    def operand(self) -> tuple[int, int, WeightLayout]:
        """The address, stride and layout that a packet contains for the matrix."""
        assert self.matrix is not None, f"{self.name} is not a matrix"
        return self.matrix.operand

    def hold(self, matrix: ArrangedMatrix[A]) -> ArrangedMatrix[A]:
        """Attach ``matrix``, which may be the stored bytes themselves."""
        self.matrix = matrix
        if matrix.layout is WeightLayout.STORED and self.allocation is None:
            self.allocation = matrix.allocation
        return matrix


def outputs_of(graph: Graph, stored: Callable[[str], A]) -> Mapping[str, tuple[BufferDecl, A]]:
    """The OUTPUT buffers of ``graph``, and the memory of each."""
    return {decl.name: (decl, stored(decl.name)) for decl in graph.of_kind(BufferKind.OUTPUT)}
