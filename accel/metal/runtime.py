"""An open device: queue, memory, program, and the traits that the self-test found."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from accel.kernels.device_probe import ALL_NATIVE, traits_of
from accel.kernels.source import Traits
from accel.metal.device import NEWER_HINT, default_device
from accel.metal.memory import Memory
from accel.metal.objc import TIER, ObjectiveC
from accel.metal.program import Program
from accel.metal.queue import Queue
from accel.metal.self_check import ask
from accel.packets.step_memory import StepAddresses
from contract.errors import TierError, TierUnavailable


@dataclass(frozen=True, slots=True)
class Choices:
    """What a caller may decide about a device; None leaves it to the device.

    ``memory_bytes`` is the most memory. ``traits`` replaces the result of the self-test, so that
    integers compute what the device could.
    """

    memory_bytes: int | None = None
    traits: Traits | None = None


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


def open_runtime(objc: ObjectiveC, requested: str, choices: Choices) -> Runtime:
    """Open the device and test it.

    Raises TierUnavailable when there is none, it lacks something, its arithmetic is not exact, or
    its memory is used up.
    """
    with ExitStack() as undo:
        device = default_device(objc, requested)
        undo.callback(objc.release, device.handle)
        try:
            queue = Queue(objc, device)
            # The queue owns the device from now on.
            undo.pop_all()
            undo.callback(queue.close)
            capacity = device.memory_bytes
            if choices.memory_bytes is not None:
                capacity = min(capacity, choices.memory_bytes)
            memory = Memory(queue, capacity)
            undo.callback(memory.close)
            program = Program(queue, choices.traits or ALL_NATIVE)
            undo.callback(program.close)
            if choices.traits is None:
                answer = partial(ask, memory, program)
                program.traits = traits_of(answer, TIER, device.name, has_dot=False)
        except TierUnavailable:
            raise
        except TierError as error:
            reason = f"{device.name} cannot be used ({error})"
            raise TierUnavailable(TIER, reason, NEWER_HINT) from None
        undo.pop_all()
        return Runtime(queue, memory, program)
