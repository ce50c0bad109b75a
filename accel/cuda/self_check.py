"""Tests a device's arithmetic once before a model runs on it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from accel.cuda.driver import TIER
from accel.cuda.launcher import Arguments, LaunchShape, start_kernel
from accel.cuda.memory import Memory
from accel.cuda.program import Modules, plain_source
from accel.kernels.source import GROUP_SIZE, Module
from accel.packets.packet import PACKET
from accel.packets.samples import SAMPLES, sample_pairs
from contract.arrays import Floats
from contract.errors import TierUnavailable

MODULE = Module("self_test")
RESULTS = 9
"""Words of a row of results, see ``accel/kernels/self_test.k``."""

Words = NDArray[np.uint32]


def check_arithmetic(memory: Memory, modules: Modules) -> None:
    """Raise TierUnavailable unless the device computes the kernels' basic operations as numpy does.
    Raises CudaError when the device cannot compute at all."""
    a, b = sample_pairs()
    words = np.random.default_rng(21).integers(0, 1 << 32, SAMPLES, dtype=np.uint32)
    # A NaN may lose its payload when it is converted.
    words[words & 0x7C00 == 0x7C00] = 0
    found = _computed(memory, modules, a, b, words)
    for column, (operation, expected) in _expected(a, b, words).items():
        if not np.array_equal(found[:, column], expected.view(np.uint32)):
            raise TierUnavailable(
                TIER, f"the device {operation} inexactly", "choose another device or a newer driver"
            )


def _expected(a: Floats, b: Floats, words: Words) -> Mapping[int, tuple[str, NDArray[np.generic]]]:
    left, right = words.view(np.int8).reshape(-1, 4), a.view(np.int8).reshape(-1, 4)
    signed = (left.astype(np.int32) * right).sum(axis=1, dtype=np.int32)
    mixed = (left.astype(np.int32) * right.view(np.uint8)).sum(axis=1, dtype=np.int32)
    return {
        0: ("divides", a / b),
        1: ("takes square roots", np.sqrt(a)),
        2: ("multiplies and adds", a * b + a),
        5: ("widens binary16", words.astype(np.uint16).view(np.float16).astype(np.float32)),
        7: ("multiplies packed bytes", signed),
        8: ("multiplies packed bytes of both kinds", mixed),
    }


def _computed(memory: Memory, modules: Modules, a: Floats, b: Floats, words: Words) -> Words:
    given = [memory.adopt("self-test", values.view(np.uint8)) for values in (a, b, words)]
    results = memory.allocate("self-test", len(a) * RESULTS * 4)
    packet = np.zeros(1, PACKET)
    packet["operand"][0, :4] = [allocation.address for allocation in (*given, results)]
    packet["stride"][0, 3] = RESULTS
    packet["size"][0, 0] = len(a)
    function = modules.function(plain_source(MODULE), MODULE.entry)
    shape = LaunchShape(function, (-(-len(a) // GROUP_SIZE), 1, 1), GROUP_SIZE)
    arguments = Arguments(np.uint64(0), np.uint64(0), packet[0])
    start_kernel(memory.context, memory.stream, shape, arguments)
    found = memory.staging.read(results, 0, results.nbytes).view(np.uint32)
    for allocation in (*given, results):
        memory.free(allocation)
    return found.reshape(-1, RESULTS)
