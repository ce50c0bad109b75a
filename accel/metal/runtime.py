"""An open device: queue, memory, program, and the traits that the self-test found."""

from __future__ import annotations

from contextlib import ExitStack

from accel.kernels.device_probe import ALL_NATIVE
from accel.kernels.runtime import DeviceChoices, DeviceRuntime
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
            runtime = Runtime(queue, memory, program, launch_packet)
            if choices.traits is None:
                runtime.probe(TIER, device.name)
        except TierUnavailable:
            raise
        except TierError as error:
            reason = f"{device.name} cannot be used ({error})"
            raise TierUnavailable(TIER, reason, NEWER_HINT) from None
        undo.pop_all()
        return runtime
