"""A step of tuned kernels on emulated blocks: lowered, planned and bound as on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.packed_tiles import UNITS, tile_bytes
from accel.cuda.plan import Plan, PlannedLaunch, plain_ops, plan_launches
from accel.cuda.program import tuned_source
from accel.cuda.unpacked_pages import unpack_rotated
from accel.packets.binding import bind_step
from accel.packets.layouts import WeightLayout
from accel.packets.packet import BANK_SHIFT, SCRATCH_MEMORY
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches
from accel.packets.step import Op
from contract.dtypes import DType
from contract.ir.graph import Graph
from contract.ir.inputs import input_layout, pack_inputs
from contract.shape_key import ShapeKey
from reference.exact.activation import quantize_activation
from tests.cuda.emulator import emulate

Bytes = NDArray[np.uint8]
StandIn = Callable[[np.void, ShapeKey, Bytes, Bytes], None]
"""Executes the op of a packet, given the step's size, its memory and its inputs."""
OFFSET_MASK = (1 << BANK_SHIFT) - 1
DEVICE = Device(0, "emulated", (9, 0), 3, 1 << 34, 227 << 10, 13000)
OLDER = Device(0, "emulated", (8, 0), 3, 1 << 34, 163 << 10, 13000)
"""Without products of warp groups."""

NO_STAND_INS: Mapping[str, StandIn] = MappingProxyType({})


def aligned_memory(nbytes: int) -> Bytes:
    """uint8[nbytes] at a multiple of 256 bytes, every float a NaN."""
    room = np.full(nbytes + 512, 0xFF, np.uint8)
    start = -room.ctypes.data % 256
    return room[start : start + nbytes]


def arranged(dtype: DType, stored: Bytes, folder: Path) -> Bytes:
    """The units of uint8[rows, row_bytes]."""
    rows, row_bytes = stored.shape
    columns = row_bytes // dtype.block_bytes * dtype.block_elements
    tiles = -(-rows // UNITS.group_rows)
    target = aligned_memory(tiles * tile_bytes(dtype, columns))
    source = tuned_source(UNITS.file, {"DTYPE": dtype.ggml_id})
    emulate(source, folder).run(
        UNITS.entry,
        UNITS.grid(dtype, columns, tiles),
        UNITS.threads,
        *(stored.ctypes.data, target.ctypes.data, rows, columns, 0, tiles),
    )
    return target


def in_device_memory(values: NDArray[Any]) -> NDArray[Any]:
    """A copy that lies as buffers of a device do."""
    place = aligned_memory(values.nbytes)
    place[:] = np.frombuffer(values.tobytes(), np.uint8)
    return place.view(values.dtype).reshape(values.shape)


def run_step(
    graph: Graph,
    sizes: tuple[ShapeKey, ShapeKey],
    inputs: Mapping[str, NDArray[Any]],
    kept: Mapping[str, NDArray[Any]],
    matrices: Mapping[str, tuple[DType, Bytes]],
    folder: Path,
    parts: int = 1,
    device: Device = DEVICE,
    stand_ins: Mapping[str, StandIn] = NO_STAND_INS,
    launches_of: Callable[[Sequence[Op], Plan], Sequence[PlannedLaunch]] = lambda _, plan: (
        plan.launches
    ),
    first_event: int = 0,
) -> None:
    """One step of the first of ``sizes`` in the form of the second; no plain kernel may be left
    but quantize_activation, for which the definition stands in, and those of ``stand_ins``.

    ``kept`` are the buffers that outlive it, results included, ``matrices`` the quantized weights
    as a file stores them; row reductions are cut in ``parts``. ``launches_of`` the ops and the plan
    are executed."""
    key, bucket = sizes
    step = unpack_rotated(lower_graph(graph, bucket, parts, "cuda"), graph, bucket)
    plan = plan_launches(step.ops, device, step.scratch)
    known = {"quantize_activation": quantize_plainly} | dict(stand_ins)
    assert {step.ops[i].name for i in plain_ops(plan)} <= known.keys()
    schedule = schedule_launches(step, plan.levels)
    layout = input_layout(graph, bucket)
    block, scratch = aligned_memory(layout.nbytes), aligned_memory(max(1, schedule.shared_bytes))
    block[:] = pack_inputs(layout, key, inputs, first_event)
    units = {name: arranged(*matrix, folder) for name, matrix in matrices.items()}

    def matrix_of(name: str) -> tuple[int, int, WeightLayout]:
        dtype, stored = matrices[name]
        columns = stored.shape[1] // dtype.block_bytes * dtype.block_elements
        return units[name].ctypes.data, tile_bytes(dtype, columns), WeightLayout.UNITS

    packets = bind_step(step, schedule, layout, lambda name: kept[name].ctypes.data, matrix_of)
    workspace = aligned_memory(max(1, plan.workspace_bytes))
    workspace[:] = 0
    for launch in launches_of(step.ops, plan):
        if launch.workspace is None:
            known[step.ops[launch.first].name](packets[launch.first], key, scratch, block)
            continue
        own = workspace.ctypes.data + launch.workspace
        replaced = packets.ctypes.data + launch.first * packets.itemsize
        addresses = scratch.ctypes.data, block.ctypes.data, replaced
        assert launch.shared_bytes <= device.shared_bytes
        emulate(launch.source, folder).run(
            launch.entry, launch.grid, launch.threads, *addresses, own
        )
    assert not workspace[plan.transient_bytes :].any()


def rows_of(
    packet: np.void,
    number: int,
    shape: tuple[int, int],
    dtype: Any,
    memory: tuple[Bytes, Bytes],
    stride: int | None = None,
) -> NDArray[Any]:
    """Operand ``number`` of a packet, which lies in the first or the second part of ``memory``;
    ``stride`` for one that always has the same."""
    stored = int(packet["operand"][number])
    apart = int(packet["stride"][number]) if stride is None else stride
    base = memory[0] if stored & SCRATCH_MEMORY else memory[1]
    at, size = stored & OFFSET_MASK, np.dtype(dtype).itemsize
    whole = base[at : at + ((shape[0] - 1) * apart + shape[1]) * size].view(dtype)
    return np.lib.stride_tricks.as_strided(whole, shape, (apart * size, size))


def quantize_plainly(packet: np.void, key: ShapeKey, scratch: Bytes, inputs: Bytes) -> None:
    """Execute one quantize_activation."""
    columns = int(packet["size"][1])
    padded = -(-columns // 256) * 256

    def rows(number: int, width: int, dtype: type) -> NDArray[Any]:
        return rows_of(packet, number, (key.tokens, width), dtype, (scratch, inputs))

    m, scale, sums = plain_integers(rows(0, columns, np.float32))
    rows(1, padded, np.int16)[:] = m
    rows(2, padded // 256, np.float32)[:] = scale
    rows(3, padded // 32, np.uint32)[:] = sums


def plain_integers(x: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """What the plain kernel of quantize_activation leaves: of every 32 columns 32 high and 32 low
    bytes, four columns in the order 0, 2, 1, 3; scales; and sums over 16 columns each."""
    tokens, columns = x.shape
    padded = -(-columns // 256) * 256
    made = quantize_activation(np.ascontiguousarray(x))
    m = np.zeros((tokens, padded), np.int32)
    m[:, :columns] = made.m
    fours = m.reshape(tokens, padded // 32, 8, 4)[..., [0, 2, 1, 3]]
    parts = np.stack([fours >> 4, fours & 15], axis=2).astype(np.int8).reshape(tokens, -1)
    sums = m.reshape(tokens, padded // 16, 16).sum(axis=-1).astype(np.int16)
    return parts.view(np.int16), made.scale, sums.view(np.uint32)
