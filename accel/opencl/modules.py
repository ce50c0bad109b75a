"""Runs the kernels that GPU tiers share, with one launch per packet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import Language, Module, Traits, module_of, module_source
from accel.opencl.launcher import LaunchContext, Launcher, LaunchRecording, Recording
from accel.packets.packet import BANK_SHIFT, BANKS
from accel.packets.step import Op

BuildText = Callable[[str, str], Any]
"""Builds a program from a name and a text."""


class ModuleLauncher(Launcher):
    """Every packet is a launch of its op's module.

    A launch has at most ``groups`` work-groups. A module is built when a step first needs it."""

    by_modules: ClassVar[bool] = True

    def __init__(
        self, launch: LaunchContext, groups: int, traits: Traits, build: BuildText
    ) -> None:
        super().__init__(launch, groups)
        self._traits = traits
        self._build = build
        self._programs: dict[Module, Any] = {}

    def record(self, packets: NDArray[np.void], address: int, ops: Sequence[Op]) -> Recording:
        launches = []
        for op in ops:
            module = module_of(op)
            groups = op.launch_groups(module.group_size, self.workers)
            launches.append((self.kernel(module), groups * module.group_size, module.group_size))
        return LaunchRecording(self.launch, launches, self._leading, address)

    def _leading(self) -> tuple[Any, ...]:
        return *self.launch.memory.arguments(), np.uint64(self.launch.scratch.shared)

    def run_alone(self, module: Module, packet: NDArray[np.void], buffers: Sequence[Any]) -> None:
        """Run one ``packet`` outside any step, with all groups, and wait for its end.

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
