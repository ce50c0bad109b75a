"""Matrices arranged for the products by the device itself, when they are uploaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from accel.cuda.launcher import Arguments, LaunchShape, start_kernel
from accel.cuda.memory import Allocation, Memory
from accel.cuda.program import Modules, Source, tuned_source
from accel.cuda.registered import LAYOUTS
from accel.cuda.tuned import ArrangedLayout, Extent
from accel.cuda.upload import Uploader
from accel.packets.accessors import packet_constants
from accel.packets.layouts import LANES, WeightLayout, group_bytes
from accel.packets.mirrors import Bytes
from accel.packets.stacks import Stack
from contract.dtypes import DType, StorageClass

Launch = Callable[[int, range], None]
"""Has some groups arranged whose stored rows lie at an address."""
BLOCK = 128
MOST_GROUPS = 1 << 15
"""Of a launch's second dimension."""
OPENCL_FILES = ("packet.h", "blocks.h", "lanes_layout.h", "arrange.cl")


@dataclass(frozen=True, slots=True)
class ArrangedMatrix:
    """A weight as the products read it. ``row_bytes`` is the stride of the layout: of a row as
    stored, else of a group of rows."""

    allocation: Allocation
    row_bytes: int
    layout: WeightLayout

    @property
    def operand(self) -> tuple[int, int, WeightLayout]:
        """What a packet says of it: address, stride and layout."""
        return self.allocation.address, self.row_bytes, self.layout


def arranged_row_bytes(dtype: DType, layout: WeightLayout, columns: int) -> int:
    """The stride of a layout."""
    if layout is WeightLayout.LANES:
        return group_bytes(dtype, columns)
    return LAYOUTS[layout].group_bytes(dtype, columns)


def group_rows(layout: WeightLayout) -> int:
    """Rows that a layout keeps together."""
    return LANES if layout is WeightLayout.LANES else LAYOUTS[layout].group_rows


@dataclass(slots=True)
class Arranger:
    """Arranges matrices on one device. Its programs, one a format, are built when first needed."""

    memory: Memory
    modules: Modules
    uploader: Uploader

    def upload(
        self, name: str, dtype: DType, data: Bytes, matrices: int, layout: WeightLayout
    ) -> ArrangedMatrix:
        """uint8[rows, row_bytes] of ``matrices`` one below the other, in device memory.

        Float matrices stay as they are. Raises OutOfMemory naming the buffer.
        """
        if dtype.storage is StorageClass.FLOAT:
            place = self.memory.allocate(name, data.nbytes, zeroed=False)
            self.uploader.copy(data, place)
            return ArrangedMatrix(place, data.shape[1], WeightLayout.STORED)
        stack = Stack(dtype, data, len(data) // matrices, group_rows(layout))
        row_bytes = arranged_row_bytes(dtype, layout, stack.columns)
        place = self.memory.allocate(name, stack.groups * row_bytes, zeroed=False)
        if layout is WeightLayout.LANES:
            launch = self._into_lanes(stack, place)
        else:
            launch = self._into(LAYOUTS[layout], stack, place, row_bytes)
        self.uploader.arrange(stack, launch)
        return ArrangedMatrix(place, row_bytes, layout)

    def _into_lanes(self, stack: Stack, place: Allocation) -> Launch:
        function = self.modules.function(_lanes_source(stack.dtype), "arrange")
        units = stack.columns // stack.dtype.block_elements * LANES

        def launch(stored: int, groups: range) -> None:
            grid = (-(-units // BLOCK), min(len(groups), MOST_GROUPS), 1)
            self._start(function, grid, BLOCK, (stored, place.address, 0), stack, groups)

        return launch

    def _into(
        self, layout: ArrangedLayout, stack: Stack, place: Allocation, row_bytes: int
    ) -> Launch:
        macros: Mapping[str, int] = {"DTYPE": stack.dtype.ggml_id}
        function = self.modules.function(tuned_source(layout.file, macros), layout.entry)

        def launch(stored: int, groups: range) -> None:
            grid = layout.grid(stack.dtype, stack.columns, len(groups))
            target = place.address + groups.start * row_bytes
            self._start(function, grid, layout.block, (stored, target), stack, groups)

        return launch

    def _start(
        self,
        function: Any,
        grid: Extent,
        block: int,
        addresses: tuple[int, ...],
        stack: Stack,
        groups: range,
    ) -> None:
        numbers = stack.rows, stack.columns, groups.start, len(groups)
        arguments = Arguments(*map(np.uint64, addresses), *map(np.uint32, numbers))
        shape = LaunchShape(function, grid, (block, 1, 1))
        start_kernel(self.memory.context, self.memory.stream, shape, arguments)


def _lanes_source(dtype: DType) -> Source:
    """The OpenCL tier's kernel, which is C for both."""
    folder = resources.files("accel")
    macros = (("DTYPE", dtype.ggml_id), ("GROUP_SIZE", BLOCK), ("SHARED_ADDRESSES", 1))
    kernels = folder.joinpath("opencl", "kernels")
    files = [folder.joinpath("cuda", "kernels", "opencl_c.h")]
    files += [kernels.joinpath(name) for name in OPENCL_FILES]
    texts = [packet_constants(), *(file.read_text(encoding="utf-8") for file in files)]
    options = ("--device-as-default-execution-space",)
    return Source(f"arrange.{dtype}", "\n".join(texts), macros, options)
