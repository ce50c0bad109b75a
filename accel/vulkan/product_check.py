"""Tests matrix units before use: their products must have the bits of packed dot products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from accel.kernels.matrix_tiles import EXPANDED_FORMATS
from accel.kernels.products import (
    FORMATS,
    GROUPS,
    PLANE_CALLS,
    PLANES,
    ROWS,
    TOKENS,
    Product,
    product_of,
)
from accel.kernels.source import ALL_OPS
from accel.vulkan.memory import Memory
from accel.vulkan.program import Program
from accel.vulkan.queue import Queue
from accel.vulkan.self_check import launch_packet

UNWRITTEN = np.full(TOKENS * ROWS, np.nan, np.float32)


def matrices_agree(queue: Queue, memory: Memory, program: Program) -> bool:
    """Whether products on matrix units equal those of packed dots, bit for bit.

    Raises VulkanError where the driver rejects a kernel.
    """
    return all(_agrees(queue, memory, program, product_of(dtype)) for dtype in FORMATS)


def _agrees(queue: Queue, memory: Memory, program: Program, product: Product) -> bool:
    held = {name: memory.adopt("self-test", data) for name, data in product.operands.items()}
    y = held["y"] = memory.allocate("self-test", 4 * TOKENS * ROWS)
    planes = PLANES if product.dtype in EXPANDED_FORMATS else {}
    held |= {name: memory.allocate("self-test", nbytes) for name, nbytes in planes.items()}
    addresses = {name: allocation.address for name, allocation in held.items()}

    def launch(name: str, operands: dict[str, int]) -> None:
        pipeline = program.pipeline(product.module(name))
        packet = product.packet(name, operands)
        launch_packet(queue, memory, program, ALL_OPS[name], pipeline, packet, GROUPS)

    def begin() -> None:
        """Fill y with NaN, so that a kernel that writes nothing is detected."""
        memory.write(y, 0, UNWRITTEN.view(np.uint8))

    def result() -> NDArray[np.float32]:
        return memory.read(y, 0, y.nbytes).view(np.float32).copy()

    results = []
    try:
        for name in product.kernels:
            begin()
            launch(name, {operand: addresses[operand] for operand in (*product.operands, "y")})
            results.append(result())
        if planes:
            begin()
            for name, buffers in PLANE_CALLS:
                launch(name, {operand: addresses[buffer] for operand, buffer in buffers.items()})
            results.append(result())
    finally:
        for allocation in held.values():
            memory.free(allocation)
    return all(np.array_equal(results[0], other, equal_nan=True) for other in results[1:])
