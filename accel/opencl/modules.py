"""Runs the kernels that GPU tiers share, with one launch per packet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from accel.kernels.source import Language, Module, Traits, module_of, module_source
from accel.opencl.launcher import LaunchContext, Launcher, LaunchRecording, Recording
from accel.packets.packet import BANK_SHIFT, BANKS
from accel.packets.step import Op
from contract.arrays import Records

BuildText = Callable[[str, str], Any]
"""Builds a program from a name and a text."""


class ModuleLauncher(Launcher):
    """Launches the module of its op for every packet.

    A launch has at most ``groups`` work-groups. ``traits`` are the operations that the device
    computes exactly itself; ``build`` compiles a module when a step first needs it."""

    by_modules: ClassVar[bool] = True

    def __init__(
        self, launch: LaunchContext, groups: int, traits: Traits, build: BuildText
    ) -> None:
        super().__init__(launch, groups)
        self._traits = traits
        self._build = build
        self._programs: dict[Module, Any] = {}

    def record(self, packets: Records, address: int, ops: Sequence[Op]) -> Recording:
        launches = []
        for op in ops:
            module = module_of(op)
            groups = op.launch_groups(module.group_size, self.workers)
            launches.append((self.kernel(module), groups * module.group_size, module.group_size))
        return LaunchRecording(self.launch, launches, self._leading, address)

    def _leading(self) -> tuple[Any, ...]:
        """The arguments of every launch before the address of the inputs."""
        return *self.launch.memory.arguments(), np.uint64(self.launch.scratch.shared)

    def run_alone(self, module: Module, packet: Records, buffers: Sequence[Any]) -> None:
        """Run ``module`` on ``packet``, PACKET[1], outside any step, and wait for its end.

        On a device with its own memory the packet's addresses are in ``buffers``, each of which is
        a bank: at most BANKS - 1 of them."""
        launch = self.launch
        arguments: tuple[Any, ...] = ()
        address = packet.ctypes.data
        if not launch.memory.shared:
            flags = launch.cl.READ_ONLY | launch.cl.COPY_HOST_PTR
            copied_packet = launch.cl.Buffer(launch.queue.context, flags, hostbuf=packet)
            banks = *buffers, copied_packet
            arguments = *banks, *[None] * (BANKS - len(banks))
            address = len(buffers) << BANK_SHIFT
        kernel = self.kernel(module)
        kernel.set_args(*arguments, *map(np.uint64, (0, 0, address)), np.uint32(0))
        size = module.group_size
        launch.cl.enqueue_nd_range_kernel(launch.queue, kernel, (self.workers * size,), (size,))
        launch.queue.finish()

    def close(self) -> None:
        self._programs.clear()

    def kernel(self, module: Module) -> Any:
        """A new kernel object for a packet, because binding arguments costs as much as a launch.
        Raises BuildError naming the module."""
        if module not in self._programs:
            text = module_source(Language.OPENCL, module, self._traits)
            self._programs[module] = self._build(str(module), text)
        return self.launch.cl.Kernel(self._programs[module], module.entry)
