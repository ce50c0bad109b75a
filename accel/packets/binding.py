"""Binds a lowered step to memory: every tensor of every op gets an address and a stride."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accel.packets.layouts import WeightLayout
from accel.packets.ops import NUMBERS
from accel.packets.packet import (
    ABSENT,
    INPUT_MEMORY,
    OPERANDS,
    OWN_MEMORY,
    PACKET,
    REALS,
    SCRATCH_MEMORY,
    SIZES,
)
from accel.packets.step import PRODUCTS, Op, OpSchedule, Schedule, Step, Tensor
from contract.arrays import Records
from contract.ir.inputs import InputLayout

NO_NUMBER = 0xFFFF_FFFF
"""The op number in packets of fused ops, each of which has its own kernel (``fused_ops.py``)."""

BUFFER_MEMORY = 1 << 60
"""Set in an operand that holds a buffer number instead of an address, in stored packets."""
BUFFER_SHIFT = 44

AddressOf = Callable[[str], int]
"""Returns the device address of a graph buffer that outlives a step."""

MatrixOf = Callable[[str], tuple[int, int, WeightLayout]]
"""Returns device address, bytes per row and layout of a matrix arranged for products."""


def bind_step(
    step: Step, schedule: Schedule, inputs: InputLayout, address_of: AddressOf, matrix_of: MatrixOf
) -> Records:
    """PACKET[ops] in execution order; ``inputs`` has the offset of each REQUEST buffer."""
    factors = product_factors(step)
    packets = []
    for op, op_schedule in zip(step.ops, schedule.op_schedules, strict=True):
        layout = 0
        operands, strides = [0] * OPERANDS, [0] * OPERANDS
        for index, tensor in enumerate(op.operands):
            if tensor is None:
                operands[index] = ABSENT
            elif index in op.matrices and tensor.buffer in factors:
                operands[index], strides[index], layout = matrix_of(tensor.buffer)
            else:
                operands[index] = _address(tensor, schedule, inputs, address_of)
                strides[index] = tensor.stride
        packets.append(_packet(op, op_schedule, layout, tuple(operands), tuple(strides)))
    return np.array(packets, PACKET)


def symbolic(number: int) -> int:
    """The operand that stands for the first byte of buffer ``number``."""
    return BUFFER_MEMORY | number << BUFFER_SHIFT


def product_factors(step: Step) -> set[str]:
    """Buffers that some product reads as a matrix; other ops read their arranged layout too."""
    matrices = [op.operands[i] for op in step.ops if op.name in PRODUCTS for i in op.matrices]
    return {matrix.buffer for matrix in matrices if matrix is not None}


def stored_operands(step: Step) -> set[str]:
    """Buffers that some op reads or writes in the layout declared by the graph."""
    factors = product_factors(step)
    return {
        tensor.buffer
        for op in step.ops
        for index, tensor in enumerate(op.operands)
        if tensor is not None and not (index in op.matrices and tensor.buffer in factors)
    }


def _packet(
    op: Op, plan: OpSchedule, layout: int, operands: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[Any, ...]:
    """The fields of a PACKET as a tuple of Python numbers, since assigning to one element of a
    numpy array takes ten times as long."""
    sizes = op.count.multiplier, *op.sizes, *[0] * (SIZES - len(op.device.sizes))
    return (
        NUMBERS.get(op.name, NO_NUMBER),
        plan.wait,
        plan.everyone,
        plan.columns,
        op.dtype.ggml_id if op.dtype is not None else 0,
        layout,
        op.count.per,
        0,
        operands,
        strides,
        sizes,
        (*op.reals, *[0.0] * (REALS - len(op.reals))),
    )


def _address(tensor: Tensor, schedule: Schedule, inputs: InputLayout, address_of: AddressOf) -> int:
    offset = tensor.start * tensor.item_bytes
    if tensor.buffer in schedule.own:
        return OWN_MEMORY | schedule.own[tensor.buffer] + offset
    if tensor.buffer in schedule.shared:
        return SCRATCH_MEMORY | schedule.shared[tensor.buffer] + offset
    if tensor.buffer in inputs.offsets:
        return INPUT_MEMORY | inputs.offsets[tensor.buffer] + offset
    return address_of(tensor.buffer) + offset


def lone_packet(operands: Sequence[int], sizes: Sequence[int]) -> Records:
    """PACKET[1] of an op that belongs to no step."""
    packet = np.zeros(1, PACKET)
    packet["operand"] = ABSENT
    packet["operand"][0, : len(operands)] = operands
    packet["size"][0, : len(sizes)] = sizes
    return packet
