"""An open GPU: memory, queue, kernels, and the results of the self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from accel.amd.device import Device, Driver
from accel.amd.kernel import Kernel
from accel.amd.kfd import Kfd
from accel.amd.packet_check import check_packets
from accel.amd.program import Modules
from accel.amd.queue import Queue
from accel.amd.self_check import ProbeCase, divides_exactly
from accel.amd.userq import UserQueues
from accel.kernels.product_check import matrices_agree
from accel.packets.step_memory import StepAddresses
from contract.errors import OutOfMemory, TierUnavailable


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a caller; None leaves one to the device.

    ``memory_bytes`` is the most of the GPU's own memory to use. ``native``: it divides and takes
    roots itself, else integers do. ``matrices``: products of many tokens use matrix
    instructions."""

    memory_bytes: int | None = None
    native: bool | None = None
    matrices: bool | None = None


@dataclass(slots=True)
class Runtime:
    """The parts of an open GPU."""

    device: Device
    queue: Queue
    modules: Modules
    addresses: StepAddresses = field(default_factory=StepAddresses)
    _matrices: bool | None = None

    def uses_matrices(self) -> bool:
        """Whether products of many tokens use matrix instructions; tested at the first call. Raises
        DeviceLost and OutOfMemory."""
        if self._matrices is None:
            case = ProbeCase(self.device, self.queue, self.modules)
            self._matrices = self.device.generation.matrices and matrices_agree(
                case.device, case.launch, every=False
            )
        return self._matrices

    def close(self) -> None:
        """Close everything."""
        with ExitStack() as undo:
            undo.callback(self.device.close)
            undo.callback(self.modules.close)
            undo.callback(self.queue.close)


DRIVERS: Mapping[str, Callable[[Kernel, str], Driver]] = {"t1": Kfd, "t2": UserQueues}


def open_runtime(tier: str, kernel: Kernel, requested: str, choices: Choices) -> Runtime:
    """Open the first GPU whose name contains ``requested``, and test it. Raises TierUnavailable
    when there is none, it lacks something, or its arithmetic is not exact."""
    with ExitStack() as undo:
        device = Device(kernel, DRIVERS[tier](kernel, requested), choices.memory_bytes)
        undo.callback(device.close)
        try:
            queue = Queue(device)
            undo.callback(queue.close)
            modules = Modules(device)
            undo.callback(modules.close)
            check_packets(device, queue, modules)
            if choices.native is None:
                modules.native = divides_exactly(ProbeCase(device, queue, modules))
            else:
                modules.native = choices.native
        except (OSError, OutOfMemory) as error:
            reason = f"{device.name} cannot be used: {error}"
            raise TierUnavailable(tier, reason, "free the GPU, or see dmesg") from None
        undo.pop_all()
        return Runtime(device, queue, modules, _matrices=choices.matrices)
