"""An open device: queue, memory, program, and the traits that the self-test found."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from accel.intel.api import TIER, LevelZero, LevelZeroError
from accel.intel.compiler import find_spirv_compiler
from accel.intel.device import chosen_device
from accel.intel.launcher import launch_packet
from accel.intel.memory import Memory
from accel.intel.program import Program
from accel.intel.queue import Queue
from accel.kernels.device_probe import ALL_NATIVE
from accel.kernels.runtime import DeviceChoices, DeviceRuntime
from contract.errors import TierError, TierUnavailable


@dataclass(frozen=True, slots=True)
class Choices(DeviceChoices):
    """See DeviceChoices. ``cache`` is the folder of compiled kernels, None for none on disk.
    ``discrete`` refuses a GPU that shares the host's memory."""

    cache: Path | None = None
    discrete: bool = False


Runtime = DeviceRuntime[Queue, Memory, Program]


def open_runtime(zero: LevelZero, requested: str, choices: Choices) -> Runtime:
    """Open the device and test it. Raises TierUnavailable when there is none, it lacks something,
    its arithmetic is not exact, or its memory is used up."""
    device = chosen_device(zero, requested)
    if choices.discrete and device.integrated:
        reason = f"{device.name} is no graphics card of its own"
        raise TierUnavailable(TIER, reason, f"--tier {TIER} uses it all the same")
    compiler = find_spirv_compiler(choices.cache)
    with ExitStack() as undo:
        try:
            queue = Queue(zero, device)
            undo.callback(queue.close)
            memory = Memory(queue, choices.capacity(device.memory_bytes))
            undo.callback(memory.close)
            program = Program(queue, compiler, choices.traits or ALL_NATIVE)
            undo.callback(program.close)
            runtime = Runtime(queue, memory, program, launch_packet)
            if choices.traits is None:
                runtime.probe(TIER, device.name)
        except TierUnavailable:
            raise
        except (LevelZeroError, TierError) as error:
            reason = f"{device.name} cannot be used ({error})"
            hint = "free the device, choose another, or install a newer driver"
            raise TierUnavailable(TIER, reason, hint) from None
        undo.pop_all()
        return runtime
