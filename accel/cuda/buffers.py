"""Buffers of graphs on the device: a weight is kept as ops read it, in one way or in both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.cuda.arrange import ArrangedMatrix, arranged_row_bytes, group_rows
from accel.cuda.memory import Allocation
from accel.cuda.plan import layout_of
from accel.cuda.runtime import Runtime
from accel.packets.layouts import WeightLayout
from contract.dtypes import StorageClass
from contract.ir.nodes import BufferDecl, BufferKind
from contract.tier import Heap


@dataclass(slots=True, eq=False)
class CudaBuffer:
    """Device memory of one graph buffer.

    A weight is kept as the products read it (``matrix``) or as stored (``allocation``), and as the
    other too once an op wants that; ``source`` is the host's view of its stored bytes.
    """

    decl: BufferDecl
    nbytes: int
    heap: Heap
    allocation: Allocation | None = None
    source: NDArray[np.uint8] | None = None
    matrix: ArrangedMatrix | None = None

    @property
    def name(self) -> str:
        """The logical name of the graph buffer it holds."""
        return self.decl.name

    @property
    def allocations(self) -> list[Allocation]:
        """All its memory."""
        matrix = self.matrix.allocation if self.matrix is not None else None
        return list({id(a): a for a in (self.allocation, matrix) if a is not None}.values())


def is_matrix(decl: BufferDecl) -> bool:
    """Whether products may read the buffer: it is a matrix or a stack of them."""
    return decl.kind is BufferKind.WEIGHT and len(decl.shape) in (2, 3)


@dataclass(frozen=True, slots=True)
class Weights:
    """Brings uploads to one device when somebody wants them there."""

    runtime: Runtime

    def stored(self, buffer: CudaBuffer) -> Allocation:
        """The bytes of a buffer as the graph declares them."""
        if buffer.allocation is None:
            assert buffer.source is not None
            memory = self.runtime.memory
            place = memory.allocate(buffer.name, buffer.nbytes, zeroed=False)
            self.runtime.uploader.copy(_rows(buffer.source), place)
            buffer.allocation = place
        return buffer.allocation

    def matrix(self, buffer: CudaBuffer) -> ArrangedMatrix:
        """A weight as the products read it."""
        if buffer.matrix is None:
            decl = buffer.decl
            assert buffer.source is not None, f"{decl.name} is no upload"
            assert is_matrix(decl), f"{decl.name} is not a matrix"
            matrices = int(decl.shape[0]) if len(decl.shape) == 3 else 1
            layout = layout_of(decl, self.runtime.device)
            source, arranger = _rows(buffer.source), self.runtime.arranger
            buffer.matrix = arranger.upload(decl.name, decl.dtype, source, matrices, layout)
            if buffer.matrix.layout is WeightLayout.STORED and buffer.allocation is None:
                buffer.allocation = buffer.matrix.allocation
        return buffer.matrix

    def arranged_bytes(self, decl: BufferDecl) -> int:
        """What ``matrix`` takes beside the stored bytes."""
        if not is_matrix(decl) or decl.dtype.storage is StorageClass.FLOAT:
            return 0
        *matrices, rows, columns = (int(dim) for dim in decl.shape)
        layout = layout_of(decl, self.runtime.device)
        groups = -(-rows // group_rows(layout)) * (matrices[0] if matrices else 1)
        return groups * arranged_row_bytes(decl.dtype, layout, columns)


def _rows(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return data.reshape(-1, data.shape[-1])
