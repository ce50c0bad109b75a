"""The device arranges matrices for the products when they are uploaded."""

from __future__ import annotations

from collections.abc import Sequence

from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import MOST_GROUPS
from accel.kernels.source import Module
from accel.metal.launcher import launch_alone
from accel.metal.memory import Allocation, Memory
from accel.metal.program import Program


class Arranger(PlaneArranger[Allocation]):
    """Arranges matrices on one device; stored bytes are a view of the file where there is one."""

    def __init__(self, memory: Memory, program: Program) -> None:
        super().__init__(memory, MOST_GROUPS)
        self._device_memory = memory
        self._program = program

    def _launch(
        self, module: Module, operands: Sequence[int], sizes: Sequence[int], groups: int
    ) -> None:
        pipeline = self._program.pipeline(module)
        launch_alone(self._device_memory, pipeline, module.op, operands, sizes, groups)
