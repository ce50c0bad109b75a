"""Matrices arranged for the products by the GPU itself, when they are uploaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.amd.kfd import Allocation
from accel.amd.launcher import MOST_GROUPS, launch_alone
from accel.amd.runtime import Runtime
from accel.kernels.source import GROUP_SIZE, Module
from accel.packets.layouts import LANES, WeightLayout, group_bytes
from accel.packets.stacks import Stack
from contract.dtypes import DType, StorageClass

STORED_BYTES = 1 << 26
"""Stored bytes that are in host memory of the GPU at a time, before they are arranged."""


@dataclass(frozen=True, slots=True)
class ArrangedMatrix:
    """A weight as the products read it. ``row_bytes`` is the kernel's stride."""

    place: Allocation
    row_bytes: int
    layout: WeightLayout


def arranged(
    runtime: Runtime, name: str, dtype: DType, data: NDArray[np.uint8], matrices: int
) -> ArrangedMatrix:
    """uint8[rows, row_bytes] of ``matrices`` one below the other, in the GPU's memory.

    Float matrices stay as they are. Raises OutOfMemory naming the buffer, and DeviceLost.
    """
    device = runtime.device
    if dtype.storage is StorageClass.FLOAT:
        place = device.allocate(name, data.nbytes)
        place.host[:] = data.reshape(-1)
        return ArrangedMatrix(place, data.shape[1], WeightLayout.STORED)
    stack = Stack(dtype, data, len(data) // matrices)
    row_bytes = group_bytes(dtype, stack.columns)
    place = device.allocate(name, stack.groups * row_bytes)
    parts = stack.parts(STORED_BYTES)
    most = max(stack.stored(groups).nbytes for groups in parts)
    staging = device.allocate(f"{name} as stored", most, device=False)
    kernel = runtime.modules.kernel(Module("arrange", dtype))
    units = stack.columns // dtype.block_elements * LANES
    for groups in parts:
        part = stack.stored(groups)
        staging.host[: part.nbytes] = part.reshape(-1)
        sizes = len(groups), stack.rows, stack.columns, groups.start
        launched = min(-(-len(groups) * units // GROUP_SIZE), MOST_GROUPS)
        addresses = staging.address, place.address
        launch_alone(device, runtime.queue, kernel, addresses, sizes, launched)
    device.free(staging)
    return ArrangedMatrix(place, row_bytes, WeightLayout.LANES)
