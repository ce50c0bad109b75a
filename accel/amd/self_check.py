"""Tests a GPU's arithmetic once before a model runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from accel.amd.device import Device
from accel.amd.launcher import launch_packet
from accel.amd.program import Modules
from accel.amd.queue import Queue
from accel.kernels.device_probe import SELF_TEST, Found, results_of, right, samples
from accel.kernels.source import Module
from contract.arrays import Records
from contract.errors import TierUnavailable

REMEDIED = {"divide", "root"}
"""Operations that the integers of ``exact.k`` can compute instead."""


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """The parts of an open GPU that run a kernel outside of any step."""

    device: Device
    queue: Queue
    modules: Modules

    def answer(self, native: bool) -> Found:
        """The GPU's results for the samples; without ``native`` in integers."""
        kernel = self.modules.kernel(SELF_TEST, native)
        return results_of(self.device, partial(launch_packet, self.device, self.queue, kernel))

    def launch(self, module: Module, packet: Records, groups: int) -> None:
        """Run the kernel of a module with PACKET[1] outside of any step, and wait for it. Raises
        DeviceLost."""
        launch_packet(self.device, self.queue, self.modules.kernel(module), packet, groups)


def divides_exactly(case: ProbeCase) -> bool:
    """Whether the GPU divides and takes roots exactly; if not, integers do. Raises TierUnavailable
    if integers do not help."""
    expected = samples().expected
    wrong = {name for name, good in right(case.answer(True), expected).items() if not good}
    native = not wrong
    if wrong and wrong <= REMEDIED:
        wrong = {name for name, good in right(case.answer(False), expected).items() if not good}
    if wrong:
        reason = f"{case.device.name} does not compute exactly: {', '.join(sorted(wrong))}"
        raise TierUnavailable(case.device.tier, reason, "choose another device or report this")
    return native
