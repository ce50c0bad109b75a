"""The GPU arranges matrices for the products when they are uploaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from accel.amd.device import Allocation
from accel.amd.launcher import launch_alone
from accel.amd.runtime import Runtime
from accel.kernels.launches import MOST_GROUPS
from accel.kernels.source import Module
from accel.packets.buffers import ArrangedMatrix
from accel.packets.device_op import pieces
from accel.packets.layouts import TILE_ROWS, UNIT_COLUMNS, WeightLayout, tile_bytes
from accel.packets.stacks import Stack
from contract.dtypes import DType, StorageClass

STORED_BYTES = 1 << 26
"""Most stored bytes in host memory of the GPU at a time before they are arranged."""


def arranged(
    runtime: Runtime, name: str, dtype: DType, data: NDArray[np.uint8], matrices: int
) -> ArrangedMatrix[Allocation]:
    """Copy uint8[rows, row_bytes], ``matrices`` matrices one after the other, to the GPU's memory.

    Float matrices stay as they are. Raises OutOfMemory naming the buffer, and DeviceLost.
    """
    device = runtime.device
    if dtype.storage is StorageClass.FLOAT:
        target = device.allocate(name, data.nbytes)
        target.host[:] = data.reshape(-1)
        return ArrangedMatrix(target, data.shape[1], WeightLayout.STORED)
    stack = Stack(dtype, data, len(data) // matrices, TILE_ROWS)
    row_bytes = tile_bytes(dtype, stack.columns)
    target = device.allocate(name, stack.groups * row_bytes)
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
        addresses = staging.address, target.address
        launch_alone(device, runtime.queue, kernel, addresses, sizes, launched)
    device.free(staging)
    return ArrangedMatrix(target, row_bytes, WeightLayout.PLANES)
