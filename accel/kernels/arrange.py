"""Uploads weights for tiers whose device arranges quantized matrices in planes by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from accel.kernels.launches import MAX_GROUPS
from accel.kernels.source import Module
from accel.packets.binding import lone_packet
from accel.packets.buffers import ArrangedMatrix
from accel.packets.device_op import pieces
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, WeightLayout, tile_bytes
from accel.packets.stacks import Stack
from accel.packets.tier import A, DeviceMemory
from contract.arrays import Bytes, Records
from contract.dtypes import DType, StorageClass

STORED_BYTES = 1 << 26
"""Most stored bytes in staging memory at a time before they are arranged."""


class PlaneArranger(Generic[A]):
    """Arranges matrices on one device.

    ``launch`` runs the kernel of a module with PACKET[1] and a number of work-groups outside of any
    step, and waits for it. ``allocate`` makes memory for the planes, of which launches write every
    byte; ``stage`` makes memory with stored bytes, which is freed after a launch."""

    def __init__(
        self,
        memory: DeviceMemory[A],
        launch: Callable[[Module, Records, int], None],
        max_groups: int = MAX_GROUPS,
        allocate: Callable[[str, int], A] | None = None,
        stage: Callable[[str, Bytes], A] | None = None,
    ) -> None:
        self._memory = memory
        self._launch = launch
        self._max_groups = max_groups
        self._allocate = allocate or memory.allocate
        self._stage = stage or memory.adopt

    def upload(
        self,
        name: str,
        dtype: DType,
        data: Bytes,
        matrices: int,
        allocate: Callable[[str, int], A] | None = None,
    ) -> ArrangedMatrix[A]:
        """Copy uint8[rows, row_bytes], the rows of ``matrices`` matrices, to memory that
        ``allocate`` makes; without it, to memory of the device.

        Float matrices are not rearranged. Raises OutOfMemory naming the buffer, and DeviceLost."""
        if dtype.storage is StorageClass.FLOAT:
            stored = (
                self._memory.adopt(name, data) if allocate is None else allocate(name, data.nbytes)
            )
            if allocate is not None:
                self._memory.write(stored, 0, data)
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        stack = Stack(dtype, data, len(data) // matrices, TILE_ROWS)
        row_bytes = tile_bytes(dtype, stack.columns)
        target = (allocate or self._allocate)(name, stack.groups * row_bytes)
        try:
            for groups in stack.parts(STORED_BYTES):
                self._arrange(name, stack, groups, target)
        except BaseException:
            self._memory.free(target)
            raise
        return ArrangedMatrix(target, row_bytes, WeightLayout.PLANES)

    def _arrange(self, name: str, stack: Stack, groups: range, target: A) -> None:
        module = Module("arrange", stack.dtype)
        items = len(groups) * TILE_ROWS * pieces(stack.columns, UNIT_COLUMNS)
        launched = min(pieces(items, module.group_size), self._max_groups)
        sizes = len(groups), stack.rows, stack.columns, groups.start
        stored = self._stage(f"{name} as stored", stack.stored(groups))
        try:
            self._launch(module, lone_packet((stored.address, target.address), sizes), launched)
        finally:
            self._memory.free(stored)
