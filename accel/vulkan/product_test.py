"""What a device is asked before it multiplies on matrix units: for the bits of packed dots."""

from __future__ import annotations

import numpy as np

from accel.kernels.products import FORMATS, GROUPS, KERNELS, ROWS, TOKENS, Product, product_of
from accel.kernels.source import ALL_OPS, Module
from accel.vulkan.memory import Memory
from accel.vulkan.program import Program
from accel.vulkan.queue import Queue
from accel.vulkan.self_test import launch_packet


def matrices_agree(queue: Queue, memory: Memory, program: Program) -> bool:
    """Whether products on matrix units equal those of packed dots, bit for bit.

    Raises VulkanError where the driver rejects a kernel.
    """
    return all(_agrees(queue, memory, program, product_of(dtype)) for dtype in FORMATS)


def _agrees(queue: Queue, memory: Memory, program: Program, product: Product) -> bool:
    held = {name: memory.adopt("self-test", data) for name, data in product.operands.items()}
    y = held["y"] = memory.allocate("self-test", 4 * TOKENS * ROWS)
    addresses = {name: place.address for name, place in held.items()}
    results = []
    try:
        for name in KERNELS:
            pipeline = program.pipeline(Module(name, product.dtype))
            packet = product.packet(name, addresses)
            launch_packet(queue, memory, program, ALL_OPS[name], pipeline, packet, GROUPS)
            results.append(memory.read(y, 0, y.nbytes).view(np.float32).copy())
    finally:
        for place in held.values():
            memory.free(place)
    return np.array_equal(results[0], results[1], equal_nan=True)
