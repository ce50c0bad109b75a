"""What a device is asked once before it is trusted with a model."""

from __future__ import annotations

import numpy as np

from accel.kernels.device_probe import RESULTS, Found, columns, samples
from accel.kernels.source import GROUP_SIZE, Module, Traits
from accel.metal.launcher import launch_alone
from accel.metal.memory import Allocation, Memory
from accel.metal.program import Program
from accel.packets.device_op import pieces


def ask(memory: Memory, program: Program, traits: Traits) -> Found:
    """What the device makes of the samples, compiled for ``traits``."""
    pipeline = program.pipeline(Module("self_test"), traits)
    given = samples()
    count = len(given.a)
    places: list[Allocation] = []
    try:
        for array in (given.a, given.b, given.words):
            places.append(memory.adopt("self-test", array.view(np.uint8)))
        places.append(memory.allocate("self-test", 4 * len(RESULTS) * count))
        addresses = [place.address for place in places]
        groups = pieces(count, GROUP_SIZE)
        launch_alone(memory, pipeline, "self_test", addresses, (count,), groups)
        return columns(places[-1].host.view(np.int32).reshape(count, -1).copy())
    finally:
        for place in places:
            memory.free(place)
