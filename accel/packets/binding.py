"""A step becomes packets: every tensor an address and a stride."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from accel.packets.layouts import WeightLayout
from accel.packets.ops import NUMBERS
from accel.packets.packet import ABSENT, INPUT_MEMORY, OWN_MEMORY, PACKET, SCRATCH_MEMORY
from accel.packets.step import PRODUCTS, Op, Placement, Schedule, Step, Tensor
from contract.ir.inputs import InputLayout

NO_NUMBER = 0xFFFF_FFFF
"""Of an op that only kernels of their own execute, see ``fused``."""

AddressOf = Callable[[str], int]
"""Device address of a buffer of the graph that outlives a step."""

MatrixOf = Callable[[str], tuple[int, int, WeightLayout]]
"""Device address, bytes of a row and layout of a matrix prepared for the products."""


def bind_step(
    step: Step,
    schedule: Schedule,
    inputs: InputLayout,
    address_of: AddressOf,
    matrix_of: MatrixOf,
) -> NDArray[np.void]:
    """PACKET[ops] in execution order; ``inputs`` says where REQUEST buffers lie."""
    packets = np.zeros(len(step.ops), PACKET)
    factors = product_factors(step)
    for packet, op, placement in zip(packets, step.ops, schedule.placements, strict=True):
        _fill(packet, op, placement)
        for index, tensor in enumerate(op.operands):
            packet["operand"][index] = ABSENT
            if tensor is None:
                continue
            stride = tensor.stride
            if index == op.matrix and tensor.buffer in factors:
                address, stride, layout = matrix_of(tensor.buffer)
                packet["layout"] = layout
            else:
                address = _address(tensor, schedule, inputs, address_of)
            packet["operand"][index] = address
            packet["stride"][index] = stride
    return packets


def product_factors(step: Step) -> set[str]:
    """Buffers some product reads: other ops read these as arranged for it, too."""
    matrices = [
        op.operands[op.matrix] for op in step.ops if op.name in PRODUCTS and op.matrix is not None
    ]
    return {matrix.buffer for matrix in matrices if matrix is not None}


def stored_operands(step: Step) -> set[str]:
    """Buffers some op reads or writes as the graph declares them."""
    factors = product_factors(step)
    return {
        tensor.buffer
        for op in step.ops
        for index, tensor in enumerate(op.operands)
        if tensor is not None and not (index == op.matrix and tensor.buffer in factors)
    }


def _fill(packet: np.void, op: Op, placement: Placement) -> None:
    packet["op"] = NUMBERS.get(op.name, NO_NUMBER)
    packet["wait"] = placement.wait
    packet["everyone"] = placement.everyone
    packet["split_columns"] = placement.columns
    packet["dtype"] = op.dtype.ggml_id if op.dtype is not None else 0
    packet["counted"] = op.count.per
    packet["size"][: len(op.device.sizes)] = op.count.multiplier, *op.sizes
    packet["real"][: len(op.reals)] = op.reals


def _address(tensor: Tensor, schedule: Schedule, inputs: InputLayout, address_of: AddressOf) -> int:
    offset = tensor.start * tensor.item_bytes
    if tensor.buffer in schedule.own:
        return OWN_MEMORY | schedule.own[tensor.buffer] + offset
    if tensor.buffer in schedule.shared:
        return SCRATCH_MEMORY | schedule.shared[tensor.buffer] + offset
    if tensor.buffer in inputs.offsets:
        return INPUT_MEMORY | inputs.offsets[tensor.buffer] + offset
    return address_of(tensor.buffer) + offset
