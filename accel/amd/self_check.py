"""Tests a GPU's arithmetic once before a model runs on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.amd.device import Device
from accel.amd.launcher import launch_alone, launch_packet
from accel.amd.program import Modules
from accel.amd.queue import Queue
from accel.kernels.device_probe import RESULTS, Found, columns, right, samples
from accel.kernels.products import FORMATS, GROUPS, KERNELS, ROWS, TOKENS, Product, product_of
from accel.kernels.source import GROUP_SIZE, Module
from contract.errors import TierUnavailable

MODULE = Module("self_test")
REMEDIED = {"divide", "root"}
"""Operations that the integers of ``exact.k`` can compute instead."""


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """The parts of an open GPU that a test needs."""

    device: Device
    queue: Queue
    modules: Modules

    def answer(self, native: bool) -> Found:
        """The GPU's results for the samples; without ``native`` in integers."""
        given = samples()
        arrays = [array.view(np.uint8) for array in (given.a, given.b, given.words)]
        count = len(given.a)
        buffers = [self.device.allocate("self-test", array.nbytes) for array in arrays]
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer.host[:] = array
        buffers.append(self.device.allocate("self-test", 4 * len(RESULTS) * count))
        kernel = self.modules.kernel(MODULE, native)
        addresses = [buffer.address for buffer in buffers]
        groups = -(-count // GROUP_SIZE)
        launch_alone(self.device, self.queue, kernel, addresses, (count,), groups)
        words = buffers[-1].host.view(np.int32).reshape(count, -1).copy()
        for buffer in buffers:
            self.device.free(buffer)
        return columns(words)


def divides(case: ProbeCase) -> bool:
    """Whether the GPU divides and takes roots exactly; if not, integers do.

    Raises TierUnavailable where integers do not help.
    """
    expected = samples().expected
    wrong = {name for name, good in right(case.answer(True), expected).items() if not good}
    native = not wrong
    if wrong and wrong <= REMEDIED:
        wrong = {name for name, good in right(case.answer(False), expected).items() if not good}
    if wrong:
        reason = f"{case.device.name} does not compute exactly: {', '.join(sorted(wrong))}"
        raise TierUnavailable(case.device.tier, reason, "choose another device or report this")
    return native


def matrices_agree(case: ProbeCase) -> bool:
    """Whether products by matrix instructions equal those of packed dots, bit for bit.

    Raises DeviceLost and OutOfMemory.
    """
    return all(_agrees(case, product_of(dtype)) for dtype in FORMATS)


def _agrees(case: ProbeCase, product: Product) -> bool:
    device, modules = case.device, case.modules
    sizes = {name: data.nbytes for name, data in product.operands.items()} | {
        "y": 4 * TOKENS * ROWS
    }
    held = {name: device.allocate("self-test", nbytes) for name, nbytes in sizes.items()}
    for name, data in product.operands.items():
        held[name].host[: data.nbytes] = data
    addresses = {name: allocation.address for name, allocation in held.items()}
    results = []
    for op in KERNELS:
        # y is filled with NaN, so that a kernel that writes nothing is detected.
        held["y"].host[: sizes["y"]] = 0xFF
        kernel = modules.kernel(Module(op, product.dtype))
        launch_packet(device, case.queue, kernel, product.packet(op, addresses), GROUPS)
        results.append(held["y"].host[: sizes["y"]].view(np.float32).copy())
    for allocation in held.values():
        device.free(allocation)
    return np.array_equal(results[0], results[1], equal_nan=True)
