"""Every packet the AMD tiers send, tried on one GPU and told line by line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from accel.amd.device import Device
from accel.amd.kernel import Kernel, LinuxKernel
from accel.amd.packet_check import packet_tests
from accel.amd.program import Modules
from accel.amd.queue import Queue
from accel.amd.runtime import DRIVERS
from accel.amd.tools.trace import Trace, Tracer
from contract.errors import TierUnavailable, system_words
from harness.tiers import SIMULATED


def system(device: str) -> tuple[Kernel, str]:
    """The system a GPU named like that is looked for in, and its name there."""
    if device != SIMULATED:
        return LinuxKernel(), device
    from accel.amd.tools.simulated import simulated_kernel

    return simulated_kernel(), ""


def try_packets(
    tier: str, kernel: Kernel, requested: str, tell: Callable[[str], None], record: bool
) -> tuple[bool, Trace]:
    """Whether all tests pass, and what went through the queue if it is to be kept.

    Raises TierUnavailable where there is no GPU or it cannot be used.
    """
    device = Device(kernel, DRIVERS[tier](kernel, requested))
    passed = True
    with ExitStack() as undo:
        undo.callback(device.close)
        try:
            queue = Queue(device)
        except OSError as error:
            reason = f"{device.name} cannot be used: {system_words(error)}"
            raise TierUnavailable(tier, reason, "free the GPU, or see dmesg") from None
        undo.callback(queue.close)
        tracer = Tracer(device, queue)
        if record:
            tracer.attach()
        tell(f"{device.name}, {device.driver.version}")
        for result in packet_tests(device, queue, Modules(device)):
            tell(f"{'FAILED' if result.problem else 'ok':<8}{result.proves}")
            if result.problem:
                tell(f"        {result.problem}")
                passed = False
    return passed, tracer.trace
