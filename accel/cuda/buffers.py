"""Buffers of graphs on the device; a weight is stored in each layout that an op reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from accel.cuda.arrange import arranged_row_bytes, group_rows
from accel.cuda.memory import Allocation, Memory
from accel.cuda.plan import layout_of
from accel.cuda.runtime import Runtime
from accel.cuda.streamed_weights import StreamedWeights
from accel.cuda.upload import Arrived
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer
from accel.packets.layouts import grouped_bytes, matrices_of
from contract.arrays import Bytes
from contract.dtypes import StorageClass
from contract.ir.nodes import BufferDecl

CudaBuffer = DeviceBuffer[Allocation]


@dataclass(frozen=True, slots=True)
class Weights:
    """Uploads weights to one device in the layouts that are needed, or from there to host memory
    where they are ``streamed``."""

    runtime: Runtime
    streamed: StreamedWeights

    def stored(self, buffer: CudaBuffer, arrived: Arrived | None = None) -> Allocation:
        """The bytes of a buffer in the layout that the graph declares."""
        if buffer.allocation is None:
            assert buffer.source is not None
            memory = self.runtime.memory
            allocation = memory.allocate(buffer.name, buffer.nbytes, zeroed=False)
            self.runtime.uploader.copy(_rows(buffer.source), allocation, arrived)
            buffer.allocation = allocation
        return buffer.allocation

    def matrix(
        self, buffer: CudaBuffer, arrived: Arrived | None = None
    ) -> ArrangedMatrix[Allocation]:
        """A weight in the layout that products read."""
        if buffer.matrix is None:
            decl = buffer.decl
            assert buffer.source is not None, f"{decl.name} is no upload"
            matrices = matrices_of(decl)
            assert matrices, f"{decl.name} is not a matrix"
            layout = layout_of(decl, self.runtime.device)
            source, arranger = buffer.source, self.runtime.arranger
            source = source if is_share_of_stack(decl, source) else _rows(source)
            allocate = self.streamed.allocate if self.streamed.holds(decl) else None
            named = decl.name, decl.dtype
            return buffer.hold(arranger.upload(*named, source, matrices, layout, arrived, allocate))
        return buffer.matrix

    def prepare(self, decls: Iterable[BufferDecl]) -> None:
        """Build the programs that arrange these weights."""
        quantized = [d for d in decls if d.dtype.storage is not StorageClass.FLOAT]
        device = self.runtime.device
        self.runtime.arranger.prepare({(d.dtype, layout_of(d, device)) for d in quantized})
        self.runtime.finite.build()

    def arranged_bytes(self, decl: BufferDecl) -> int:
        """Bytes of a weight in the layout of products."""
        layout = layout_of(decl, self.runtime.device)
        return grouped_bytes(
            decl,
            group_rows(layout),
            lambda dtype, columns: arranged_row_bytes(dtype, layout, columns),
        )


def is_share_of_stack(decl: BufferDecl, data: Bytes) -> bool:
    """Whether ``data`` has only some rows of every matrix of a stack."""
    return len(decl.shape) == data.ndim == 3


def _rows(data: Bytes) -> Bytes:
    return data.reshape(-1, data.shape[-1])


@dataclass(slots=True)
class TransientMemory:
    """The workspaces whose contents no later step needs: one block of memory for all buckets of a
    device, whose steps run one after the other.

    It is never freed before ``memory``, since launches are recorded with its address."""

    memory: Memory
    _allocations: list[Allocation] = field(default_factory=list)

    def address(self, nbytes: int) -> int:
        """The address of ``nbytes`` bytes, 0 for none. Raises OutOfMemory."""
        if not nbytes:
            return 0
        if not self._allocations or self._allocations[-1].nbytes < nbytes:
            self._allocations.append(self.memory.allocate("what launches pass on", nbytes))
        return self._allocations[-1].address
