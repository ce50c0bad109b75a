"""Matrices arranged for the products by the GPU itself, when they are uploaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from accel.amd.device import Allocation
from accel.amd.launcher import MOST_GROUPS, launch_alone
from accel.amd.runtime import Runtime
from accel.kernels.source import Module
from accel.packets.buffers import ArrangedMatrix
from accel.packets.device_op import pieces
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, WeightLayout, tile_bytes
from accel.packets.stacks import Stack
from contract.dtypes import DType, StorageClass

STORED_BYTES = 1 << 26
"""Stored bytes that are in host memory of the GPU at a time, before they are arranged."""


def arranged(
    runtime: Runtime, name: str, dtype: DType, data: NDArray[np.uint8], matrices: int
) -> ArrangedMatrix[Allocation]:
    """uint8[rows, row_bytes] of ``matrices`` one below the other, in the GPU's memory.

    Float matrices stay as they are. Raises OutOfMemory naming the buffer, and DeviceLost.
    """
    device = runtime.device
    if dtype.storage is StorageClass.FLOAT:
        place = device.allocate(name, data.nbytes)
        place.host[:] = data.reshape(-1)
        return ArrangedMatrix(place, data.shape[1], WeightLayout.STORED)
    stack = Stack(dtype, data, len(data) // matrices, TILE_ROWS)
    row_bytes = tile_bytes(dtype, stack.columns)
    place = device.allocate(name, stack.groups * row_bytes)
    parts = stack.parts(STORED_BYTES)
    most = max(stack.stored(groups).nbytes for groups in parts)
    staging = device.allocate(f"{name} as stored", most, device=False)
    module = Module("arrange", dtype)
    kernel = runtime.modules.kernel(module)
    row_items = TILE_ROWS * pieces(stack.columns, UNIT_COLUMNS)
    for groups in parts:
        part = stack.stored(groups)
        staging.host[: part.nbytes] = part.reshape(-1)
        sizes = len(groups), stack.rows, stack.columns, groups.start
        launched = min(pieces(len(groups) * row_items, module.group_size), MOST_GROUPS)
        addresses = staging.address, place.address
        launch_alone(device, runtime.queue, kernel, addresses, sizes, launched)
    device.free(staging)
    return ArrangedMatrix(place, row_bytes, WeightLayout.PLANES)
