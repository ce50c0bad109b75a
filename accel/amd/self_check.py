"""What a GPU is asked once before it is trusted with a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.amd.device import Device
from accel.amd.launcher import launch_alone
from accel.amd.program import Modules
from accel.amd.queue import Queue
from accel.kernels.device_probe import RESULTS, Found, columns, right, samples
from accel.kernels.source import GROUP_SIZE, Module
from contract.errors import TierUnavailable

MODULE = Module("self_test")
REMEDIED = {"divide", "root"}
"""What the integers of ``exact.k`` can do instead."""


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """Everything an answer needs."""

    device: Device
    queue: Queue
    modules: Modules

    def answer(self, native: bool) -> Found:
        """What the GPU makes of the samples, in integers unless ``native``."""
        given = samples()
        arrays = [array.view(np.uint8) for array in (given.a, given.b, given.words)]
        count = len(given.a)
        places = [self.device.allocate("self-test", array.nbytes) for array in arrays]
        for place, array in zip(places, arrays, strict=True):
            place.host[:] = array
        places.append(self.device.allocate("self-test", 4 * len(RESULTS) * count))
        kernel = self.modules.kernel(MODULE, native)
        addresses = [place.address for place in places]
        groups = -(-count // GROUP_SIZE)
        launch_alone(self.device, self.queue, kernel, addresses, (count,), groups)
        words = places[-1].host.view(np.int32).reshape(count, -1).copy()
        for place in places:
            self.device.free(place)
        return columns(words)


def divides(asked: ProbeCase) -> bool:
    """Whether the GPU divides and takes roots exactly; integers do it where it does not.

    Raises TierUnavailable where that does not help.
    """
    expected = samples().expected
    wrong = {name for name, good in right(asked.answer(True), expected).items() if not good}
    native = not wrong
    if wrong and wrong <= REMEDIED:
        wrong = {name for name, good in right(asked.answer(False), expected).items() if not good}
    if wrong:
        reason = f"{asked.device.name} does not compute exactly: {', '.join(sorted(wrong))}"
        raise TierUnavailable(asked.device.tier, reason, "choose another device or report this")
    return native
