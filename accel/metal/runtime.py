"""An open device: queue, memory, program, and the traits that the self-test found."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from accel.kernels.device_probe import ALL_NATIVE, SELF_TEST, Found, results_of, traits_of
from accel.kernels.runtime import DeviceChoices, DeviceRuntime
from accel.kernels.source import Traits
from accel.metal.device import NEWER_HINT, default_device
from accel.metal.launcher import launch_packet
from accel.metal.memory import Memory
from accel.metal.objc import TIER, ObjectiveC
from accel.metal.program import Program
from accel.metal.queue import Queue
from contract.errors import TierError, TierUnavailable

Choices = DeviceChoices
Runtime = DeviceRuntime[Queue, Memory, Program]


def open_runtime(objc: ObjectiveC, requested: str, choices: Choices) -> Runtime:
    """Open the device and test it. Raises TierUnavailable when there is none, it lacks something,
    its arithmetic is not exact, or its memory is used up."""
    with ExitStack() as undo:
        device = default_device(objc, requested)
        undo.callback(objc.release, device.handle)
        try:
            queue = Queue(objc, device)
            # The queue owns the device from now on.
            undo.pop_all()
            undo.callback(queue.close)
            memory = Memory(queue, choices.capacity(device.memory_bytes))
            undo.callback(memory.close)
            program = Program(queue, choices.traits or ALL_NATIVE)
            undo.callback(program.close)
            if choices.traits is None:
                answer = partial(_results, memory, program)
                program.traits = traits_of(answer, TIER, device.name, has_dot=False)
        except TierUnavailable:
            raise
        except TierError as error:
            reason = f"{device.name} cannot be used ({error})"
            raise TierUnavailable(TIER, reason, NEWER_HINT) from None
        undo.pop_all()
        return Runtime(queue, memory, program)


def _results(memory: Memory, program: Program, traits: Traits) -> Found:
    kernel = program.kernel(SELF_TEST, traits)
    return results_of(memory, partial(launch_packet, memory, kernel))
