"""The device arranges matrices for the products when they are uploaded."""

from __future__ import annotations

from collections.abc import Sequence

from accel.kernels.arrange import PlaneArranger
from accel.kernels.source import Module
from accel.vulkan.launcher import most_groups
from accel.vulkan.memory import Allocation, Memory
from accel.vulkan.program import Program
from accel.vulkan.queue import Queue
from accel.vulkan.self_check import launch_alone


class Arranger(PlaneArranger[Allocation]):
    """Arranges matrices on one device."""

    def __init__(self, queue: Queue, memory: Memory, program: Program) -> None:
        super().__init__(memory, most_groups(queue.device))
        self._device_memory = memory
        self._program = program

    def _target(self, name: str, nbytes: int) -> Allocation:
        return self._device_memory.allocate(name, nbytes, zeroed=False)

    def _launch(
        self, module: Module, operands: Sequence[int], sizes: Sequence[int], groups: int
    ) -> None:
        pipeline = self._program.pipelines([module])[module]
        memory, program = self._device_memory, self._program
        launch_alone(
            program.queue,
            memory,
            program,
            module.op,
            pipeline,
            list(operands),
            tuple(sizes),
            groups,
        )
