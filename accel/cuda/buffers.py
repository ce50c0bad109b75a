"""Buffers of graphs on the device: a weight is kept as ops read it, in one way or in both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.cuda.arrange import arranged_row_bytes, group_rows
from accel.cuda.memory import Allocation
from accel.cuda.plan import layout_of
from accel.cuda.runtime import Runtime
from accel.cuda.upload import Arrived
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer, matrices_of
from contract.dtypes import StorageClass
from contract.ir.nodes import BufferDecl

CudaBuffer = DeviceBuffer[Allocation]


@dataclass(frozen=True, slots=True)
class Weights:
    """Brings uploads to one device when somebody wants them there."""

    runtime: Runtime

    def stored(self, buffer: CudaBuffer, arrived: Arrived | None = None) -> Allocation:
        """The bytes of a buffer as the graph declares them."""
        if buffer.allocation is None:
            assert buffer.source is not None
            memory = self.runtime.memory
            place = memory.allocate(buffer.name, buffer.nbytes, zeroed=False)
            self.runtime.uploader.copy(_rows(buffer.source), place, arrived)
            buffer.allocation = place
        return buffer.allocation

    def matrix(
        self, buffer: CudaBuffer, arrived: Arrived | None = None
    ) -> ArrangedMatrix[Allocation]:
        """A weight as the products read it."""
        if buffer.matrix is None:
            decl = buffer.decl
            assert buffer.source is not None, f"{decl.name} is no upload"
            matrices = matrices_of(decl)
            assert matrices, f"{decl.name} is not a matrix"
            layout = layout_of(decl, self.runtime.device)
            source, arranger = buffer.source, self.runtime.arranger
            source = source if is_share_of_stack(decl, source) else _rows(source)
            return buffer.hold(
                arranger.upload(decl.name, decl.dtype, source, matrices, layout, arrived)
            )
        return buffer.matrix

    def prepare(self, decls: Iterable[BufferDecl]) -> None:
        """Have ready what arranges these weights."""
        quantized = [d for d in decls if d.dtype.storage is not StorageClass.FLOAT]
        device = self.runtime.device
        self.runtime.arranger.prepare({(d.dtype, layout_of(d, device)) for d in quantized})
        self.runtime.finite.build()

    def arranged_bytes(self, decl: BufferDecl) -> int:
        """What ``matrix`` takes beside the stored bytes."""
        if not matrices_of(decl) or decl.dtype.storage is StorageClass.FLOAT:
            return 0
        *matrices, rows, columns = (int(dim) for dim in decl.shape)
        layout = layout_of(decl, self.runtime.device)
        groups = -(-rows // group_rows(layout)) * (matrices[0] if matrices else 1)
        return groups * arranged_row_bytes(decl.dtype, layout, columns)


def is_share_of_stack(decl: BufferDecl, data: NDArray[np.uint8]) -> bool:
    """Whether ``data`` are some rows of every matrix of a stack, between which others lie."""
    return len(decl.shape) == data.ndim == 3


def _rows(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return data.reshape(-1, data.shape[-1])
