"""Tests matrix instructions before use: their products must have the bits of packed dot
products."""

from __future__ import annotations

import numpy as np

from accel.amd.launcher import launch_packet
from accel.amd.self_check import ProbeCase
from accel.kernels.products import FORMATS, GROUPS, KERNELS, ROWS, TOKENS, Product, product_of
from accel.kernels.source import Module


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
