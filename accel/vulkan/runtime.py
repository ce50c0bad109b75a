"""An open device: queue, memory, program, and the traits that the self-test found."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from accel.kernels.device_probe import ALL_NATIVE, SELF_TEST, Found, results_of, traits_of
from accel.kernels.product_check import matrices_agree
from accel.kernels.runtime import DeviceChoices
from accel.kernels.source import Traits
from accel.packets.step_memory import StepAddresses
from accel.vulkan.api import TIER, Vulkan, VulkanError
from accel.vulkan.device import Instance
from accel.vulkan.launcher import launch_packet
from accel.vulkan.memory import Memory
from accel.vulkan.program import Program
from accel.vulkan.queue import Queue
from contract.errors import TierError, TierUnavailable


@dataclass(frozen=True, slots=True)
class Choices(DeviceChoices):
    """See DeviceChoices. ``cache`` is the folder of pipelines, None for none on disk; ``shared``
    says whether to treat the device's memory as the host's."""

    cache: Path | None = None
    shared: bool | None = None


@dataclass(slots=True)
class Runtime:
    """The parts of an open device."""

    instance: Instance
    queue: Queue
    memory: Memory
    program: Program
    addresses: StepAddresses = field(default_factory=StepAddresses)

    def close(self, lost: bool) -> None:
        """Close everything; of a ``lost`` device only what the host owns."""
        if not lost:
            self.program.close()
            self.memory.close()
        self.queue.close(lost)
        if not lost:
            self.instance.close()


def open_runtime(vulkan: Vulkan, requested: str, choices: Choices) -> Runtime:
    """Open the first matching device and test it. Raises TierUnavailable when there is none, it
    lacks something, its arithmetic is not exact, or its memory is used up."""
    with ExitStack() as undo:
        instance = undo.enter_context(Instance(vulkan))
        device = instance.device(requested)
        queue = Queue(vulkan, device)
        undo.callback(partial(queue.close, lost=False))
        shared = device.host_unified if choices.shared is None else choices.shared
        memory = Memory(queue, choices.capacity(device.memory_bytes), shared)
        undo.callback(memory.close)
        try:
            program = Program(queue, ALL_NATIVE, choices.cache)
            undo.callback(program.close)
            launch = partial(launch_packet, memory, program)

            def answer(traits: Traits) -> Found:
                return results_of(memory, partial(launch, SELF_TEST, traits=traits))

            program.traits = choices.traits or traits_of(
                answer, TIER, device.name, device.integer_dot
            )
            if device.matrices and choices.traits is None:
                agrees = matrices_agree(memory, launch, every=True)
                program.traits = replace(program.traits, matrix=agrees)
        except (VulkanError, TierError) as error:
            if isinstance(error, TierUnavailable):
                raise
            reason = f"{device.name} cannot be used ({error})"
            raise TierUnavailable(TIER, reason, "free the device or choose another") from None
        undo.pop_all()
        return Runtime(instance, queue, memory, program)
