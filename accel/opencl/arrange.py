"""The device arranges matrices for the products when they are uploaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from accel.opencl.program import CONSTANTS_FILE, build_program, kernel_text
from accel.opencl.runtime import Runtime
from accel.packets.accessors import packet_constants
from accel.packets.binding import lone_packet
from accel.packets.buffers import ArrangedMatrix
from accel.packets.build import Progress
from accel.packets.host_memory import AddressRange
from accel.packets.layouts import LANES, TILE_ROWS, WeightLayout, group_bytes, tile_bytes
from accel.packets.packet import BANK_SHIFT
from accel.packets.stacks import Stack
from contract.arrays import Bytes
from contract.dtypes import DType, StorageClass
from contract.errors import OutOfMemory
from contract.lazy_dataclass import dataclass

FILES = ("packet.h", "blocks.h", "lanes_layout.h", "arrange.cl")
STAGED_BYTES = 1 << 25
"""Most stored bytes in device memory at once that wait to be arranged."""
AHEAD_BYTES = 1 << 27
"""Most stored bytes in jobs that wait while the host prepares the next one."""
OFFSET_MASK = (1 << BANK_SHIFT) - 1
STORED_BANK = 1
"""The bank of the stored bytes in a launch with banks of its own; bank 0 is the target."""


@dataclass(slots=True)
class Arranger:
    """Arranges matrices on one device. It builds a program for each format at the first use."""

    runtime: Runtime
    cache: Path | None = None
    progress: Progress | None = None
    _kernels: dict[DType, Any] = field(default_factory=dict)
    _in_flight: deque[tuple[Any, Bytes]] = field(default_factory=deque)
    """Events, each with the host memory that the device reads until the event."""
    _ahead_bytes: int = 0
    """Bytes of host memory in ``_in_flight``."""

    def prepare(self, dtypes: Iterable[DType]) -> None:
        """Build the programs for matrices of ``dtypes`` that need one."""
        if not self.runtime.launcher.by_modules:
            for dtype in dtypes:
                if dtype.storage is not StorageClass.FLOAT:
                    self._kernel(dtype)

    def upload(
        self,
        name: str,
        dtype: DType,
        data: Bytes,
        matrices: int,
        allocate: Callable[[str, int], AddressRange] | None = None,
    ) -> ArrangedMatrix[AddressRange]:
        """uint8[rows, row_bytes] of ``matrices`` one below the other, in memory from ``allocate``,
        for None the device's own.

        With shared memory the device may still write after the return. Steps come later in its
        queue; other readers call ``finish`` first. Float matrices stay as they are. Raises
        OutOfMemory naming the buffer."""
        memory = self.runtime.memory
        if dtype.storage is StorageClass.FLOAT:
            if allocate is None:
                stored = memory.adopt(name, data, borrowed=True)
            else:
                stored = allocate(name, data.nbytes)
                memory.write(stored, 0, np.ascontiguousarray(data).reshape(-1))
            return ArrangedMatrix(stored, data.shape[1], WeightLayout.STORED)
        planes = self.runtime.launcher.by_modules
        layout = WeightLayout.PLANES if planes else WeightLayout.LANES
        together = TILE_ROWS if planes else LANES
        stack = Stack(dtype, np.ascontiguousarray(data), len(data) // matrices, together)
        row_bytes = (tile_bytes if planes else group_bytes)(dtype, stack.columns)
        nbytes = stack.groups * row_bytes
        target = (
            memory.allocate(name, nbytes, zeroed=False)
            if allocate is None
            else allocate(name, nbytes)
        )
        if memory.shared:
            source = np.uint64(stack.data.ctypes.data)
            groups = range(stack.groups)
            event = self._launch(stack, source, np.uint64(target.address), 0, groups)
            if event is not None:
                self._in_flight.append((event, stack.data))
                self._ahead_bytes += stack.data.nbytes
            self.runtime.launch.queue.flush()
            if self._ahead_bytes > AHEAD_BYTES:
                self.finish()
        else:
            self._stage(stack, target)
            self.runtime.launch.queue.finish()
        return ArrangedMatrix(target, row_bytes, layout)

    def finish(self) -> None:
        """Wait until every matrix is arranged."""
        if self._in_flight:
            self.runtime.launch.queue.finish()
            self._in_flight.clear()
            self._ahead_bytes = 0

    def forget(self) -> None:
        """Release host memory that the device no longer reads."""
        complete = self.runtime.launch.cl.COMPLETE
        while self._in_flight and self._in_flight[0][0].command_execution_status <= complete:
            _, data = self._in_flight.popleft()
            self._ahead_bytes -= data.nbytes

    def _stage(self, stack: Stack, target: AddressRange) -> None:
        """Copy and arrange as many whole row groups as fit, until all are arranged."""
        cl, queue = self.runtime.launch.cl, self.runtime.launch.queue
        parts = stack.parts(STAGED_BYTES)
        flags = cl.READ_ONLY
        nbytes = max((stack.stored(groups).nbytes for groups in parts), default=0)
        try:
            staging = cl.Buffer(self.runtime.context, flags, nbytes)
        except cl.Error:
            memory = self.runtime.memory
            raise OutOfMemory("opencl.staging", nbytes, memory.used, memory.available) from None
        bank = self.runtime.memory.arguments()[target.bank]
        for groups in parts:
            cl.enqueue_copy(queue, staging, stack.stored(groups), is_blocking=False)
            self._launch(stack, staging, bank, target.address & OFFSET_MASK, groups)

    def _launch(self, stack: Stack, stored: Any, arranged: Any, offset: int, groups: range) -> Any:
        """Arrange some row groups, the first of which begins at ``stored``.

        Returns the event of their end, or None when they have ended."""
        launch, launcher = self.runtime.launch, self.runtime.launcher
        if launcher.by_modules:
            from accel.kernels.source import Module
            from accel.opencl.modules import ModuleLauncher

            assert isinstance(launcher, ModuleLauncher)
            banked = STORED_BANK << BANK_SHIFT, offset
            operands = (stored, arranged) if launch.memory.shared else banked
            sizes = len(groups), stack.rows, stack.columns, groups.start
            packet = lone_packet(operands, sizes)
            launcher.run_alone(Module("arrange", stack.dtype), packet, (arranged, stored))
            return None
        numbers = stack.rows, stack.columns, groups.start, len(groups)
        kernel = self._kernel(stack.dtype)
        kernel.set_args(stored, arranged, np.uint64(offset), *map(np.uint32, numbers))
        size = (min(launcher.workers, len(groups)),)
        return launch.cl.enqueue_nd_range_kernel(launch.queue, kernel, size, (1,))

    def _kernel(self, dtype: DType) -> Any:
        if dtype not in self._kernels:
            runtime = self.runtime
            options = (
                f"-cl-std=CL1.2 -DSHARED_ADDRESSES={runtime.memory.shared:d} "
                f"-DDTYPE={dtype.ggml_id}"
            )
            texts = {name: kernel_text(name) for name in FILES}
            files = {CONSTANTS_FILE: packet_constants(), **texts}
            program = build_program(
                runtime.context, runtime.device, files, options, self.cache, self.progress
            )
            self._kernels[dtype] = runtime.launch.cl.Kernel(program, "arrange")
        return self._kernels[dtype]
