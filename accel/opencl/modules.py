"""The kernels that GPU tiers share, on devices where work-groups run them: one launch a packet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import Language, Module, Traits, module_of, module_source
from accel.opencl.launcher import Kinds, LaunchContext, LaunchRecording, Recording
from accel.packets.packet import BANK_SHIFT, BANKS
from accel.packets.step import Op

BuildText = Callable[[str, str], Any]
"""The built program of a text, which is called by the name given first."""


class ModuleLauncher:
    """See ``launcher.Launcher``. Every packet is a launch of its op's module, in ``groups``
    work-groups at most; modules are built when the first step wants them."""

    by_modules: ClassVar[bool] = True

    def __init__(
        self, launch: LaunchContext, groups: int, traits: Traits, build: BuildText
    ) -> None:
        self.launch = launch
        self.workers = groups
        self._groups = groups
        self._traits = traits
        self._build = build
        self._programs: dict[Module, Any] = {}

    def record(self, packets: NDArray[np.void], address: int, ops: Sequence[Op]) -> Recording:
        """See Launcher."""
        launches = []
        for op in ops:
            module = module_of(op)
            groups = op.launch_groups(module.group_size, self._groups)
            launches.append((self.kernel(module), groups * module.group_size, module.group_size))
        return LaunchRecording(self.launch, launches, self._leading, address)

    def _leading(self) -> tuple[Any, ...]:
        return *self.launch.memory.arguments(), np.uint64(self.launch.scratch.shared)

    def run_alone(self, module: Module, packet: NDArray[np.void], buffers: Sequence[Any]) -> None:
        """Run one ``packet`` that belongs to no step to its end, in as many groups as there are.

        Where the device has memory of its own, the packet's addresses are in ``buffers``, each a
        bank: at most BANKS - 1 of them.
        """
        launch = self.launch
        arguments: tuple[Any, ...] = ()
        address = packet.ctypes.data
        if not launch.memory.shared:
            flags = launch.cl.READ_ONLY | launch.cl.COPY_HOST_PTR
            place = launch.cl.Buffer(launch.queue.context, flags, hostbuf=packet)
            banks = *buffers, place
            arguments = *banks, *[None] * (BANKS - len(banks))
            address = len(buffers) << BANK_SHIFT
        kernel = self.kernel(module)
        kernel.set_args(*arguments, *map(np.uint64, (0, 0, address)), np.uint32(0))
        size = module.group_size
        launch.cl.enqueue_nd_range_kernel(launch.queue, kernel, (self._groups * size,), (size,))
        launch.queue.finish()

    def expect(self, kinds: Kinds) -> None:
        """See Launcher."""

    def check(self) -> None:
        """See Launcher: there is nobody to lose."""

    def close(self) -> None:
        """See Launcher."""
        self._programs.clear()

    def kernel(self, module: Module) -> Any:
        """A kernel object of its own for each packet: binding arguments costs as much as a launch.

        Raises BuildError naming the module.
        """
        if module not in self._programs:
            text = module_source(Language.OPENCL, module, self._traits)
            self._programs[module] = self._build(str(module), text)
        return self.launch.cl.Kernel(self._programs[module], module.entry)
