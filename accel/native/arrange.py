"""Matrices arranged for the products by the worker pool, when they are uploaded."""

from __future__ import annotations

from collections import deque
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from accel.native.names import ARRANGE
from accel.native.pool import RING_STEPS, Job, WorkerPool
from accel.packets.buffers import ArrangedMatrix
from accel.packets.host_memory import AddressRange, SharedMemory
from accel.packets.layouts import LANES, WeightLayout, group_bytes
from accel.packets.packet import PACKET
from accel.packets.stacks import Stack
from contract.dtypes import DType, StorageClass
from contract.lazy_dataclass import dataclass

MOST_AHEAD = RING_STEPS // 2
"""Matrices that are arranged while the host goes on."""


@dataclass(slots=True)
class Arranger:
    """Arranges matrices in host memory; float matrices are read where they are."""

    memory: SharedMemory
    pool: WorkerPool
    _in_flight: deque[tuple[int, tuple[NDArray[np.void], NDArray[np.uint8]]]] = field(
        default_factory=deque
    )
    """Numbers of the steps that arrange, and the packet and the stored bytes each of them reads."""

    def upload(
        self, name: str, dtype: DType, data: NDArray[np.uint8], matrices: int
    ) -> ArrangedMatrix[AddressRange]:
        """uint8[rows, row_bytes] of ``matrices`` one below the other, as the products read them.

        The workers may still be at it afterwards: steps come behind it, and whoever else reads the
        memory calls ``finish`` first. Raises OutOfMemory naming the buffer.
        """
        if dtype.storage is StorageClass.FLOAT:
            stored = self.memory.adopt(name, data, borrowed=True)
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        stack = Stack(dtype, np.ascontiguousarray(data), len(data) // matrices, LANES)
        row_bytes = group_bytes(dtype, stack.columns)
        arranged = self.memory.allocate(name, stack.groups * row_bytes, zeroed=False)
        self._arrange(stack, arranged)
        return ArrangedMatrix(arranged, row_bytes, WeightLayout.LANES)

    def finish(self) -> None:
        """Wait until every matrix is arranged."""
        if self._in_flight:
            self.pool.finish()
            self._in_flight.clear()

    def _arrange(self, stack: Stack, arranged: AddressRange) -> None:
        packet = np.zeros(1, PACKET)
        packet["op"] = ARRANGE
        packet["dtype"] = stack.dtype.ggml_id
        packet["size"][0, :4] = stack.groups, stack.rows, stack.columns, 0
        packet["operand"][0, :2] = stack.data.ctypes.data, arranged.address
        job = Job(packets=packet.ctypes.data, count=1, workers=self.pool.workers)
        self._in_flight.append((self.pool.submit(job), (packet, stack.data)))
        while len(self._in_flight) > MOST_AHEAD or self.pool.done(self._in_flight[0][0]):
            while not self.pool.wait(self._in_flight[0][0], 1.0):
                pass
            self._in_flight.popleft()
            if not self._in_flight:
                return
