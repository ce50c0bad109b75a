"""Uploads weights for tiers whose device arranges quantized matrices in planes by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic

from accel.kernels.source import Module
from accel.packets.buffers import ArrangedMatrix
from accel.packets.device_op import pieces
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, WeightLayout, tile_bytes
from accel.packets.stacks import Stack
from accel.packets.tier import A, Bytes, DeviceMemory
from contract.dtypes import DType, StorageClass

STORED_BYTES = 1 << 26
"""Most stored bytes in staging memory at a time before they are arranged."""


class PlaneArranger(ABC, Generic[A]):
    """Arranges matrices on one device. A tier implements ``_launch``."""

    def __init__(self, memory: DeviceMemory[A], most_groups: int) -> None:
        self._memory = memory
        self._most_groups = most_groups

    def upload(
        self,
        name: str,
        dtype: DType,
        data: Bytes,
        matrices: int,
        allocate: Callable[[str, int], A] | None = None,
    ) -> ArrangedMatrix[A]:
        """Copy uint8[rows, row_bytes], ``matrices`` matrices one after the other, to memory from
        ``allocate``, for None to the device's own.

        Float matrices stay as they are. Raises OutOfMemory naming the buffer, and DeviceLost.
        """
        if dtype.storage is StorageClass.FLOAT:
            stored = (
                self._memory.adopt(name, data) if allocate is None else allocate(name, data.nbytes)
            )
            if allocate is not None:
                self._memory.write(stored, 0, data)
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        stack = Stack(dtype, data, len(data) // matrices, TILE_ROWS)
        row_bytes = tile_bytes(dtype, stack.columns)
        target = (allocate or self._target)(name, stack.groups * row_bytes)
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
        launched = min(pieces(items, module.group_size), self._most_groups)
        sizes = len(groups), stack.rows, stack.columns, groups.start
        stored = self._staged(f"{name} as stored", stack.stored(groups))
        try:
            self._launch(module, (stored.address, target.address), sizes, launched)
        finally:
            self._memory.free(stored)

    def _target(self, name: str, nbytes: int) -> A:
        """Memory for the planes, of which every byte is written by the launches."""
        return self._memory.allocate(name, nbytes)

    def _staged(self, name: str, data: Bytes) -> A:
        """Memory with the stored bytes ``data``, which is freed after the launch."""
        return self._memory.adopt(name, data)

    @abstractmethod
    def _launch(
        self, module: Module, operands: Sequence[int], sizes: Sequence[int], groups: int
    ) -> None:
        """Run the kernel of a module outside of any step, and wait for it."""
