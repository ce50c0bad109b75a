"""Tests a device's arithmetic once before a model runs on it."""

from __future__ import annotations

import numpy as np

from accel.kernels.device_probe import RESULTS, Found, columns, samples
from accel.kernels.source import GROUP_SIZE, Module, Traits
from accel.metal.launcher import launch_alone
from accel.metal.memory import Allocation, Memory
from accel.metal.program import Program
from accel.packets.device_op import pieces


def ask(memory: Memory, program: Program, traits: Traits) -> Found:
    """The device's results for the samples, computed by kernels for ``traits``."""
    pipeline = program.pipeline(Module("self_test"), traits)
    given = samples()
    count = len(given.a)
    buffers: list[Allocation] = []
    try:
        for array in (given.a, given.b, given.words):
            buffers.append(memory.adopt("self-test", array.view(np.uint8)))
        buffers.append(memory.allocate("self-test", 4 * len(RESULTS) * count))
        addresses = [buffer.address for buffer in buffers]
        groups = pieces(count, GROUP_SIZE)
        launch_alone(memory, pipeline, "self_test", addresses, (count,), groups)
        return columns(buffers[-1].host.view(np.int32).reshape(count, -1).copy())
    finally:
        for buffer in buffers:
            memory.free(buffer)
