"""The device arranges matrices for the products when they are uploaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from accel.cuda.launcher import Arguments, LaunchShape, start_kernel, start_packet
from accel.cuda.memory import Allocation, Memory
from accel.cuda.program import Modules, Source, plain_source, tuned_source
from accel.cuda.registered import LAYOUTS
from accel.cuda.upload import Arrived, Uploader
from accel.kernels.source import ALL_OPS, GROUP_SIZE, Module
from accel.packets.binding import lone_packet
from accel.packets.buffers import ArrangedMatrix
from accel.packets.device_op import pieces
from accel.packets.layouts import TILE_ROWS, WeightLayout, tile_bytes
from accel.packets.stacks import Stack
from contract.arrays import Bytes
from contract.dtypes import DType, StorageClass

Launch = Callable[[int, range], None]
"""Enqueues the arranging of some groups whose stored rows lie at an address."""
MAX_GROUPS = 1 << 15
"""Most work-groups of a launch of the plain kernel, which is right with any number."""


def arranged_row_bytes(dtype: DType, layout: WeightLayout, columns: int) -> int:
    """The stride of a layout in bytes: of a tile or of a group of rows."""
    if layout is WeightLayout.PLANES:
        return tile_bytes(dtype, columns)
    return LAYOUTS[layout].group_bytes(dtype, columns)


def group_rows(layout: WeightLayout) -> int:
    """Rows of a layout's group, which are arranged together."""
    return TILE_ROWS if layout is WeightLayout.PLANES else LAYOUTS[layout].group_rows


@dataclass(slots=True)
class Arranger:
    """Arranges matrices on one device. Its programs, one for each format, are built at their first
    use."""

    memory: Memory
    modules: Modules
    uploader: Uploader

    def upload(
        self,
        name: str,
        dtype: DType,
        data: Bytes,
        matrices: int,
        layout: WeightLayout,
        arrived: Arrived | None = None,
        allocate: Callable[[str, int], Allocation] | None = None,
    ) -> ArrangedMatrix[Allocation]:
        """Copy ``data`` of ``matrices`` matrices, see ``Stack``, to memory from ``allocate``, for
        None to memory of the device.

        Float matrices stay as they are. Raises OutOfMemory naming the buffer."""
        allocate = allocate or partial(self.memory.allocate, zeroed=False)
        if dtype.storage is StorageClass.FLOAT:
            target = allocate(name, data.nbytes)
            self.uploader.copy(data, target, arrived)
            return ArrangedMatrix(target, data.shape[1], WeightLayout.STORED)
        rows = data.shape[1] if data.ndim == 3 else len(data) // matrices
        stack = Stack(dtype, data, rows, group_rows(layout))
        row_bytes = arranged_row_bytes(dtype, layout, stack.columns)
        target = allocate(name, stack.groups * row_bytes)
        if layout is WeightLayout.PLANES:
            launch = self._into_planes(stack, target)
        else:
            launch = self._into(layout, stack, target, row_bytes)

        def arrange(stored: int, groups: range) -> None:
            launch(stored, groups)
            self.memory.copy_back(target, groups.start * row_bytes, len(groups) * row_bytes)

        self.uploader.arrange(stack, arrange, arrived)
        return ArrangedMatrix(target, row_bytes, layout)

    def prepare(self, kinds: Iterable[tuple[DType, WeightLayout]]) -> None:
        """Build the programs that arrange matrices of these formats before any other program."""
        self.modules.prepare(_arranging(*kind)[0] for kind in kinds)

    def _into_planes(self, stack: Stack, target: Allocation) -> Launch:
        function = self.modules.function(*_arranging(stack.dtype, WeightLayout.PLANES))
        op = ALL_OPS["arrange"]

        def launch(stored: int, groups: range) -> None:
            sizes = len(groups), stack.rows, stack.columns, groups.start
            packet = lone_packet((stored, target.address), sizes)
            units = pieces(op.units(**dict(zip(op.sizes, sizes, strict=True))), GROUP_SIZE)
            launched = min(units, MAX_GROUPS)
            start_packet(self.memory.context, self.memory.stream, function, packet, launched)

        return launch

    def _into(self, kind: WeightLayout, stack: Stack, target: Allocation, row_bytes: int) -> Launch:
        layout = LAYOUTS[kind]
        function = self.modules.function(*_arranging(stack.dtype, kind))

        def launch(stored: int, groups: range) -> None:
            grid = layout.grid(stack.dtype, stack.columns, len(groups))
            first = target.address + groups.start * row_bytes
            numbers = stack.rows, stack.columns, groups.start, len(groups)
            addresses = map(np.uint64, (stored, first))
            arguments = Arguments(*addresses, *map(np.uint32, numbers))
            shape = LaunchShape(function, grid, layout.threads)
            start_kernel(self.memory.context, self.memory.stream, shape, arguments)

        return launch


def _arranging(dtype: DType, layout: WeightLayout) -> tuple[Source, str]:
    """The program that arranges matrices of a format, and the name of its kernel."""
    if layout is WeightLayout.PLANES:
        module = Module("arrange", dtype)
        return plain_source(module), module.entry
    kind = LAYOUTS[layout]
    return tuned_source(kind.file, {"DTYPE": dtype.ggml_id}), kind.entry
