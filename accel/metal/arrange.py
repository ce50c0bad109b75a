"""The device arranges matrices for the products when they are uploaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.kernels.launches import MOST_GROUPS
from accel.kernels.source import Module
from accel.metal.launcher import launch_alone
from accel.metal.memory import Allocation, Memory
from accel.metal.program import Program
from accel.packets.buffers import ArrangedMatrix
from accel.packets.device_op import pieces
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, WeightLayout, tile_bytes
from accel.packets.stacks import Stack
from contract.dtypes import DType, StorageClass

Bytes = NDArray[np.uint8]

STORED_BYTES = 1 << 26
"""Most stored bytes that are arranged at a time: a view of the file, or a copy elsewhere."""


@dataclass(frozen=True, slots=True)
class Arranger:
    """Arranges matrices on one device."""

    memory: Memory
    program: Program

    def upload(
        self, name: str, dtype: DType, data: Bytes, matrices: int
    ) -> ArrangedMatrix[Allocation]:
        """Copy uint8[rows, row_bytes], ``matrices`` matrices one after the other, to device memory.

        Float matrices stay as they are. Raises OutOfMemory naming the buffer, and DeviceLost.
        """
        if dtype.storage is StorageClass.FLOAT:
            stored = self.memory.adopt(name, data)
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        stack = Stack(dtype, data, len(data) // matrices, TILE_ROWS)
        row_bytes = tile_bytes(dtype, stack.columns)
        target = self.memory.allocate(name, stack.groups * row_bytes)
        try:
            for groups in stack.parts(STORED_BYTES):
                self._arrange(name, stack, groups, target)
        except BaseException:
            self.memory.free(target)
            raise
        return ArrangedMatrix(target, row_bytes, WeightLayout.PLANES)

    def _arrange(self, name: str, stack: Stack, groups: range, target: Allocation) -> None:
        module = Module("arrange", stack.dtype)
        pipeline = self.program.pipeline(module)
        row_items = TILE_ROWS * pieces(stack.columns, UNIT_COLUMNS)
        launched = min(pieces(len(groups) * row_items, module.group_size), MOST_GROUPS)
        stored = self.memory.adopt(f"{name} as stored", stack.stored(groups))
        try:
            launch_alone(
                self.memory,
                pipeline,
                module.op,
                [stored.address, target.address],
                (len(groups), stack.rows, stack.columns, groups.start),
                launched,
            )
        finally:
            self.memory.free(stored)
