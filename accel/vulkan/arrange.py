"""Matrices arranged for the products by the device itself, when they are uploaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import GROUP_SIZE, Module
from accel.packets.layouts import LANES, WeightLayout, group_bytes
from accel.vulkan.launcher import most_groups
from accel.vulkan.memory import Allocation, Memory
from accel.vulkan.program import Program
from accel.vulkan.queue import Queue
from accel.vulkan.self_test import launch_alone
from contract.dtypes import DType, StorageClass

Bytes = NDArray[np.uint8]

STORED_BYTES = 1 << 26
"""Stored bytes that are on the device at a time, before they are arranged."""


@dataclass(frozen=True, slots=True)
class ArrangedMatrix:
    """A weight as the products read it. ``row_bytes`` is the kernel's stride."""

    allocation: Allocation
    row_bytes: int
    layout: WeightLayout


@dataclass(frozen=True, slots=True)
class Arranger:
    """Arranges matrices on one device."""

    queue: Queue
    memory: Memory
    program: Program

    def upload(self, name: str, dtype: DType, data: Bytes, matrices: int) -> ArrangedMatrix:
        """uint8[rows, row_bytes] of ``matrices`` one below the other, in device memory.

        Float matrices stay as they are. Raises OutOfMemory naming the buffer.
        """
        if dtype.storage is StorageClass.FLOAT:
            stored = self.memory.adopt(name, data)
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        rows = len(data) // matrices
        columns = data.shape[1] // dtype.block_bytes * dtype.block_elements
        row_bytes = group_bytes(dtype, columns)
        matrix_groups = -(-rows // LANES)
        groups = matrix_groups * matrices
        place = self.memory.allocate(name, groups * row_bytes, zeroed=False)
        try:
            self._arrange(name, dtype, data, rows, columns, place, groups)
        except BaseException:
            self.memory.free(place)
            raise
        return ArrangedMatrix(place, row_bytes, WeightLayout.LANES)

    def _arrange(
        self,
        name: str,
        dtype: DType,
        data: Bytes,
        rows: int,
        columns: int,
        place: Allocation,
        groups: int,
    ) -> None:
        """Copy as many whole row groups as fit, arrange them, and so on."""
        stored_bytes = min(LANES, rows) * data.shape[1]
        step = min(max(1, STORED_BYTES // stored_bytes), groups)
        pipeline = self.program.pipelines([Module("arrange", dtype)])[Module("arrange", dtype)]
        staging = self.memory.allocate(f"{name} as stored", step * stored_bytes, zeroed=False)
        units = columns // dtype.block_elements * LANES
        try:
            for first in range(0, groups, step):
                count = min(step, groups - first)
                part = data[_first_row(first, rows) : _first_row(first + count, rows)]
                self.memory.write(staging, 0, part)
                launch_alone(
                    self.queue,
                    self.memory,
                    self.program,
                    pipeline,
                    [staging.address, place.address],
                    (count, rows, columns, first),
                    min(-(-count * units // GROUP_SIZE), most_groups(self.queue.device)),
                )
        finally:
            self.memory.free(staging)


def _first_row(group: int, rows: int) -> int:
    """Where row group ``group`` of matrices of ``rows`` rows begins."""
    matrix, inside = divmod(group, -(-rows // LANES))
    return matrix * rows + min(inside * LANES, rows)
