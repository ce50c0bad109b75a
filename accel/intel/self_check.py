"""Tests a device's arithmetic once before a model runs on it."""

from __future__ import annotations

import numpy as np

from accel.intel.launcher import launch_alone
from accel.intel.memory import Allocation, Memory
from accel.intel.program import Program
from accel.kernels.device_probe import RESULTS, Found, columns, samples
from accel.kernels.source import GROUP_SIZE, Module, Traits
from accel.packets.device_op import pieces


def ask(memory: Memory, program: Program, traits: Traits) -> Found:
    """The device's results for the samples, computed by kernels for ``traits``."""
    kernel = program.kernel(Module("self_test"), traits)
    given = samples()
    count = len(given.a)
    buffers: list[Allocation] = []
    try:
        for array in (given.a, given.b, given.words):
            buffers.append(memory.adopt("self-test", array.view(np.uint8)))
        results = memory.allocate("self-test", 4 * len(RESULTS) * count)
        buffers.append(results)
        addresses = [buffer.address for buffer in buffers]
        launch_alone(memory, kernel, "self_test", addresses, (count,), pieces(count, GROUP_SIZE))
        words = memory.read(results, 0, results.nbytes).view(np.int32)
        return columns(words.reshape(count, -1))
    finally:
        for buffer in buffers:
            memory.free(buffer)
