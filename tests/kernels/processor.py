"""Modules of the kernel dialect, run as OpenCL C on a processor over arrays of this process."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import STORED, Language, Module, Traits
from accel.opencl import binding as cl
from accel.opencl.device import ICD_HINT, Device, find_devices
from accel.opencl.program import build_program
from contract.dtypes import DType
from tests.kernels.rolled import rolled_source
from tests.needs import missing, need_device
from tests.opencl_parts import quick_options


def cpu_device() -> Device:
    """The first OpenCL device that is a processor."""
    devices = [device for device in need_device(find_devices) if device.is_cpu]
    return devices[0] if devices else missing("there is no OpenCL CPU device", ICD_HINT)


class ProcessorModules:
    """Builds modules when they are first wanted and launches packets of them."""

    def __init__(self, traits: Traits | None = None) -> None:
        # As tests/opencl/work_groups.py has it: the same programs, which PoCL then compiles once.
        self._device = replace(cpu_device(), is_cpu=False)
        self._context = cl.Context([self._device.handle])
        self._queue = cl.CommandQueue(self._context)
        self._traits = traits or Traits()
        self._kernels: dict[Module, Any] = {}

    def launch(
        self,
        op: str,
        packet: NDArray[np.void],
        groups: int,
        dtype: DType | None = None,
        scratch: int = 0,
        inputs: int = 0,
    ) -> None:
        """Run PACKET[1] in ``groups`` work-groups to its end. Raises BuildError."""
        module = Module(op, dtype if op in STORED else None)
        if module not in self._kernels:
            self._kernels[module] = self._built(module)
        addresses = map(np.uint64, (scratch, inputs, packet.ctypes.data))
        size = (groups * module.group_size,), (module.group_size,)
        kernel = self._kernels[module]
        kernel.set_args(*addresses, np.uint32(0))
        cl.enqueue_nd_range_kernel(self._queue, kernel, *size)
        self._queue.finish()

    def _built(self, module: Module) -> Any:
        text = rolled_source(Language.OPENCL, module, self._traits)
        options = quick_options(self._device)
        program = build_program(self._context, self._device, {str(module): text}, options, None)
        return cl.Kernel(program, module.entry)
