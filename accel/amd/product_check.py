"""What a GPU is asked before it multiplies by matrix instructions: for the bits of packed dots."""

from __future__ import annotations

import numpy as np

from accel.amd.launcher import launch_packet
from accel.amd.self_check import ProbeCase
from accel.kernels.products import FORMATS, GROUPS, KERNELS, ROWS, TOKENS, Product, product_of
from accel.kernels.source import Module


def matrices_agree(asked: ProbeCase) -> bool:
    """Whether products by matrix instructions equal those of packed dots, bit for bit.

    Raises DeviceLost and OutOfMemory.
    """
    return all(_agrees(asked, product_of(dtype)) for dtype in FORMATS)


def _agrees(asked: ProbeCase, product: Product) -> bool:
    device, modules = asked.device, asked.modules
    sizes = {name: data.nbytes for name, data in product.operands.items()} | {
        "y": 4 * TOKENS * ROWS
    }
    held = {name: device.allocate("self-test", nbytes) for name, nbytes in sizes.items()}
    for name, data in product.operands.items():
        held[name].host[: data.nbytes] = data
    addresses = {name: place.address for name, place in held.items()}
    results = []
    for op in KERNELS:
        # A kernel that writes nothing is to leave NaN, not what the one before it made.
        held["y"].host[: sizes["y"]] = 0xFF
        kernel = modules.kernel(Module(op, product.dtype))
        launch_packet(device, asked.queue, kernel, product.packet(op, addresses), GROUPS)
        results.append(held["y"].host[: sizes["y"]].view(np.float32).copy())
    for place in held.values():
        device.free(place)
    return np.array_equal(results[0], results[1], equal_nan=True)
