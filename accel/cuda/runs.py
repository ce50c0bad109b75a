"""Runs of ops that one launch replaces: where it finds operands, and what it may leave out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from accel.cuda.tuned import Remaining
from accel.packets.ops import TABLE
from accel.packets.step import Op, Tensor

OPERANDS_OF_A_PACKET = 16
"""What kernels multiply the number of a packet with to name an operand of it."""
ABSENT = -1


def operand_index(ops: Sequence[Op], number: int | None, name: str) -> int:
    """Where ``packets.h`` finds operand ``name`` of op ``number``; -1 without the op or operand."""
    if number is None:
        return ABSENT
    op = ops[number]
    index = op.device.index_of[name]
    if op.operands[index] is None:
        return ABSENT
    return number * OPERANDS_OF_A_PACKET + index


def packet_number(number: int | None) -> int:
    """A packet's number as kernels get it."""
    return ABSENT if number is None else number


@cache
def size_indices(op: str, *names: str) -> Mapping[str, int]:
    """Macros of where sizes and reals of an op stand in its packet: ``ROPE_HEADS``."""
    device = TABLE[op]
    return {
        f"{op}_{name}".upper(): (device.sizes if name in device.sizes else device.reals).index(name)
        for name in names
    }


def operand_of(op: Op, name: str) -> Tensor | None:
    """An operand by its name."""
    return op.operands[op.device.index_of[name]]


def source(op: Op) -> Tensor | None:
    """The first operand."""
    return op.operands[0]


def result(op: Op) -> Tensor | None:
    """The first result."""
    return op.operands[op.written[0]]


def nobody_reads(ops: Remaining, length: int, written: Iterable[Tensor | None]) -> bool:
    """Whether the ops behind the first ``length`` read none of their results but ``written``."""
    kept = {tensor.buffer for tensor in written if tensor is not None}
    inside = {name for op in ops[:length] for name in op.results()} - kept
    return not any(ops.is_read_behind(name, length) for name in inside)
