"""Tests matrix units before use: their products must have the bits of packed dot products."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from accel.kernels.matrix_tiles import EXPANDED_FORMATS
from accel.kernels.products import (
    FORMATS,
    GROUPS,
    KERNELS,
    PLANE_CALLS,
    PLANES,
    ROWS,
    TOKENS,
    Product,
    product_of,
)
from accel.kernels.source import Module
from accel.packets.tier import A, DeviceMemory

UNWRITTEN = np.full(TOKENS * ROWS, np.nan, np.float32)

Launch = Callable[[Module, NDArray[np.void], int], None]
"""Runs the kernel of a module with PACKET[1] and a number of work-groups, and waits for it."""


def matrices_agree(memory: DeviceMemory[A], launch: Launch, every: bool) -> bool:
    """Whether products on matrix units equal those of packed dots, bit for bit: of ``every``
    kernel, or of those that all devices with matrix units have. Raises the driver's error where it
    rejects a kernel, DeviceLost and OutOfMemory."""
    return all(_agrees(memory, launch, product_of(dtype), every) for dtype in FORMATS)


def _agrees(memory: DeviceMemory[A], launch: Launch, product: Product, every: bool) -> bool:
    planes = PLANES if every and product.dtype in EXPANDED_FORMATS else {}
    held = {name: memory.adopt("self-test", data) for name, data in product.operands.items()}

    def computed(*launches: tuple[str, Mapping[str, str]]) -> NDArray[np.float32]:
        """y after launches of ops, each with the buffer of each of its operands. y is filled with
        NaN first, so that a kernel that writes nothing is detected."""
        memory.write(held["y"], 0, UNWRITTEN.view(np.uint8))
        for op, buffers in launches:
            addresses = {operand: held[buffer].address for operand, buffer in buffers.items()}
            launch(product.module(op), product.packet(op, addresses), GROUPS)
        return memory.read(held["y"], 0, UNWRITTEN.nbytes).view(np.float32).copy()

    try:
        for name, nbytes in (("y", UNWRITTEN.nbytes), *planes.items()):
            held[name] = memory.allocate("self-test", nbytes)
        same = {name: name for name in (*product.operands, "y")}
        results = [computed((op, same)) for op in (product.kernels if every else KERNELS)]
        results += [computed(*PLANE_CALLS)] if planes else []
    finally:
        for allocation in held.values():
            memory.free(allocation)
    return all(np.array_equal(results[0], other, equal_nan=True) for other in results[1:])
