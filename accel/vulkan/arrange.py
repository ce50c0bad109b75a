"""The device arranges matrices for the products when they are uploaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import Module
from accel.packets.buffers import ArrangedMatrix
from accel.packets.device_op import pieces
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, WeightLayout, tile_bytes
from accel.packets.stacks import Stack
from accel.vulkan.launcher import most_groups
from accel.vulkan.memory import Allocation, Memory
from accel.vulkan.program import Program
from accel.vulkan.queue import Queue
from accel.vulkan.self_check import launch_alone
from contract.dtypes import DType, StorageClass

Bytes = NDArray[np.uint8]

STORED_BYTES = 1 << 26
"""Most stored bytes on the device at a time before they are arranged."""


@dataclass(frozen=True, slots=True)
class Arranger:
    """Arranges matrices on one device."""

    queue: Queue
    memory: Memory
    program: Program

    def upload(
        self, name: str, dtype: DType, data: Bytes, matrices: int
    ) -> ArrangedMatrix[Allocation]:
        """Copy uint8[rows, row_bytes], ``matrices`` matrices one after the other, to device memory.

        Float matrices stay as they are. Raises OutOfMemory naming the buffer.
        """
        if dtype.storage is StorageClass.FLOAT:
            stored = self.memory.adopt(name, data)
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        stack = Stack(dtype, data, len(data) // matrices, TILE_ROWS)
        row_bytes = tile_bytes(dtype, stack.columns)
        target = self.memory.allocate(name, stack.groups * row_bytes, zeroed=False)
        try:
            self._arrange(name, stack, target)
        except BaseException:
            self.memory.free(target)
            raise
        return ArrangedMatrix(target, row_bytes, WeightLayout.PLANES)

    def _arrange(self, name: str, stack: Stack, target: Allocation) -> None:
        """Copy as many whole tiles as fit into staging memory, arrange them, and repeat."""
        module = Module("arrange", stack.dtype)
        pipeline = self.program.pipelines([module])[module]
        parts = stack.parts(STORED_BYTES)
        nbytes = max((stack.stored(tiles).nbytes for tiles in parts), default=0)
        staging = self.memory.allocate(f"{name} as stored", nbytes, zeroed=False)
        row_items = TILE_ROWS * pieces(stack.columns, UNIT_COLUMNS)
        try:
            for tiles in parts:
                self.memory.write(staging, 0, stack.stored(tiles))
                launch_alone(
                    self.queue,
                    self.memory,
                    self.program,
                    module.op,
                    pipeline,
                    [staging.address, target.address],
                    (len(tiles), stack.rows, stack.columns, tiles.start),
                    min(
                        pieces(len(tiles) * row_items, module.group_size),
                        most_groups(self.queue.device),
                    ),
                )
        finally:
            self.memory.free(staging)
