"""An open device: queue, memory, program, and the traits that the self-test found."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from accel.intel.api import TIER, LevelZero, LevelZeroError
from accel.intel.compiler import find_spirv_compiler
from accel.intel.device import chosen_device
from accel.intel.memory import Memory
from accel.intel.program import Program
from accel.intel.queue import Queue
from accel.intel.self_check import ask
from accel.kernels.device_probe import ALL_NATIVE, traits_of
from accel.kernels.source import Traits
from accel.packets.step_memory import StepAddresses
from contract.errors import TierError, TierUnavailable


@dataclass(frozen=True, slots=True)
class Choices:
    """What a caller may decide about a device; None leaves it to the device.

    ``memory_bytes`` is the most memory. ``traits`` replaces the result of the self-test, so that
    integers compute what the device could. ``cache`` is the folder of compiled kernels, None for
    none on disk. ``discrete`` refuses a GPU that shares the host's memory.
    """

    memory_bytes: int | None = None
    traits: Traits | None = None
    cache: Path | None = None
    discrete: bool = False


@dataclass(slots=True)
class Runtime:
    """The parts of an open device."""

    queue: Queue
    memory: Memory
    program: Program
    addresses: StepAddresses = field(default_factory=StepAddresses)

    def close(self) -> None:
        """Close everything."""
        with ExitStack() as undo:
            undo.callback(self.queue.close)
            undo.callback(self.memory.close)
            undo.callback(self.program.close)


def open_runtime(zero: LevelZero, requested: str, choices: Choices) -> Runtime:
    """Open the device and test it.

    Raises TierUnavailable when there is none, it lacks something, its arithmetic is not exact, or
    its memory is used up.
    """
    device = chosen_device(zero, requested)
    if choices.discrete and device.integrated:
        reason = f"{device.name} is no graphics card of its own"
        raise TierUnavailable(TIER, reason, f"--tier {TIER} uses it all the same")
    compiler = find_spirv_compiler(choices.cache)
    with ExitStack() as undo:
        try:
            queue = Queue(zero, device)
            undo.callback(queue.close)
            capacity = device.memory_bytes
            if choices.memory_bytes is not None:
                capacity = min(capacity, choices.memory_bytes)
            memory = Memory(queue, capacity)
            undo.callback(memory.close)
            program = Program(queue, compiler, choices.traits or ALL_NATIVE)
            undo.callback(program.close)
            if choices.traits is None:
                answer = partial(ask, memory, program)
                program.traits = traits_of(answer, TIER, device.name, has_dot=False)
        except TierUnavailable:
            raise
        except (LevelZeroError, TierError) as error:
            reason = f"{device.name} cannot be used ({error})"
            hint = "free the device, choose another, or install a newer driver"
            raise TierUnavailable(TIER, reason, hint) from None
        undo.pop_all()
        return Runtime(queue, memory, program)
