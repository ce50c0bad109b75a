"""Runs of ops that one launch replaces: how kernels find operands, and which results must be
written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from accel.cuda.tuned import Remaining
from accel.packets.ops import TABLE
from accel.packets.step import Op, Tensor

OPERANDS_OF_A_PACKET = 16
"""The factor by which kernels multiply a packet's number to name an operand of it."""
ABSENT = -1
PROMPT_TOKENS_A_ROW = 4
"""Fewest tokens for each row of a bucket for prompts."""


def operand_index(ops: Sequence[Op], number: int | None, name: str) -> int:
    """The number by which ``packets.h`` finds operand ``name`` of op ``number``; -1 without the op
    or the operand."""
    if number is None:
        return ABSENT
    op = ops[number]
    index = op.device.index_of[name]
    if op.operands[index] is None:
        return ABSENT
    return number * OPERANDS_OF_A_PACKET + index


def operand_indices(ops: Sequence[Op], number: int | None, names: str) -> dict[str, int]:
    """Macros with ``operand_index`` of operands of an op: ``query`` is macro ``QUERY``, and
    ``ROUTER=weight`` is operand ``weight`` as macro ``ROUTER``."""
    pairs = [word.rpartition("=")[::2] for word in names.split()]
    return {macro or name.upper(): operand_index(ops, number, name) for macro, name in pairs}


def packet_number(number: int | None) -> int:
    """A packet's number as kernels get it, -1 for None."""
    return ABSENT if number is None else number


@cache
def size_indices(op: str, *names: str) -> Mapping[str, int]:
    """Macros with the indices of sizes and reals of an op in its packet, such as ``ROPE_HEADS``."""
    device = TABLE[op]
    return {
        f"{op}_{name}".upper(): (device.sizes if name in device.sizes else device.reals).index(name)
        for name in names
    }


def operand_of(op: Op, name: str) -> Tensor | None:
    """The operand with this name."""
    return op.operand(name)


def source(op: Op) -> Tensor | None:
    """The op's first operand."""
    return op.operands[0]


def result(op: Op) -> Tensor | None:
    """The op's first result."""
    return op.operands[op.written[0]]


def are_unread(ops: Remaining, length: int, written: Iterable[Tensor | None]) -> bool:
    """Whether no op after the first ``length`` reads a result of theirs that is not in
    ``written``."""
    left = {tensor.buffer for tensor in written if tensor is not None}
    inside = {name for op in ops[:length] for name in op.results()} - left
    return not any(ops.is_read_after(name, length) for name in inside)


def reads_prompts(ops: Remaining, tokens: int) -> bool:
    """Whether the bucket, of so many tokens, is one for prompts: steps with a row for each token
    fit in another one."""
    rows = _rows_of_step(ops)
    return rows is not None and tokens >= PROMPT_TOKENS_A_ROW * rows


def decodes(ops: Remaining, tokens: int) -> bool:
    """Whether most tokens of the bucket's steps may be of sequences that decode."""
    return _rows_of_step(ops) is not None and not reads_prompts(ops, tokens)


def _rows_of_step(ops: Remaining) -> int | None:
    """Most output rows of the bucket; None for a graph that stores no tokens."""
    found = (op.max_sizes()["rows"] for op in ops.step if op.name == "store_request_state")
    return next(found, None)
