"""The records that a persistent step kernel reads, see ``kernels/step_table.h``, and their
addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from accel.cuda.runs import ABSENT, OPERANDS_OF_A_PACKET
from accel.packets.ops import TABLE
from accel.packets.packet import ABSENT as ABSENT_OPERAND
from accel.packets.step import Op, Tensor
from contract.arrays import Records
from contract.records import record

EXCHANGE_MEMORY = 1 << 60
"""The flag of an operand that is an offset in the bank of exchanged floats."""
MATRICES = 3
PRODUCT_KIND, ATTENTION_KIND, END_KIND = 0, 1, 2
RECORD_BYTES, HEAD_BYTES = 256, 32
WORK_BYTES = 56 + 4
"""Shared memory in which the kernel stores a phase and its number of tokens."""

HEAD = record("u4 phases exchange_at bank_bytes works_at, u8 stop, u4 banks peers_at")
MAX_PEERS = 15
PEER_DEVICES = record(f"u8 count index apart[{MAX_PEERS}]")
COMMON = "u4 kind multiplier counted"
"""The fields that every record begins with."""
PRODUCT_RECORD = record(
    f"{COMMON} columns, u8 x norm_weight residual picked units[{MATRICES}] bias[{MATRICES}] "
    f"y[{MATRICES}] also[{MATRICES}], u4 rows[{MATRICES}] x_stride y_stride[{MATRICES}] "
    f"also_stride[{MATRICES}] residual_stride, f4 eps, "
    "u4 norm paired activation formats slot_bits everywhere turned reserved[9]"
)
RESULT_FIELDS = ("y", "y_stride", "also", "also_stride")
ATTENTION_RECORD = record(
    f"{COMMON} heads, u8 q k v q_weight k_weight rope_table query pages kv parts y also none[4], "
    "u4 kv_heads window slots q_stride k_stride v_stride query_stride pages_stride y_stride "
    "also_stride rotary_pairs neox q_norm k_norm, f4 scale q_eps k_eps, "
    "u4 other_window divided_from own_heads reserved[8]"
)
END_FIELDS = ("sampling", "output_rows", "query", "step", "slots", "ring", "best")
END_RECORD = record(
    f"{COMMON} vocab, u8 logits {' '.join(END_FIELDS)} arriving none[7], "
    "u4 query_stride slots_stride ring_events reserved[25]"
)
assert {RECORD_BYTES} == {
    record.itemsize for record in (PRODUCT_RECORD, ATTENTION_RECORD, END_RECORD)
}


@dataclass(frozen=True, slots=True)
class PhaseBuffers:
    """Buffers by which phases exchange results: their offsets in a bank; other launches also read
    those in ``outside``. All devices need the tensors ``everywhere``, of which each computes its
    own columns."""

    offsets: Mapping[str, int]
    outside: frozenset[str]
    bank_bytes: int
    everywhere: frozenset[Tensor] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerWorkspaces:
    """The workspaces of the other devices that execute a launch together with device ``index``:
    how far each is from this device's, in bytes, in the order of the devices."""

    index: int
    apart: tuple[int, ...]

    def record(self) -> Records:
        """PEER_DEVICES[1]."""
        record = np.zeros(1, PEER_DEVICES)
        record["count"], record["index"] = len(self.apart), self.index
        record["apart"][0, : len(self.apart)] = [one % (1 << 64) for one in self.apart]
        return record


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of an op of the step."""

    op: int
    index: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Bound:
    """The packets of a step, and the buffers that phases exchange."""

    packets: Records
    exchange: PhaseBuffers

    def stored(self, operand: Operand | None) -> tuple[int, int]:
        """The address and stride of an operand in the step's memory; zeros where there is none."""
        if operand is None:
            return 0, 0
        packet = self.packets[operand.op]
        address, stride = packet["operand"][operand.index], packet["stride"][operand.index]
        return (0, 0) if address == ABSENT_OPERAND else (int(address), int(stride))

    def read(self, operand: Operand | None) -> tuple[int, int]:
        """The address and stride from which a phase reads an operand."""
        exchanged = self._exchanged(operand)
        return self.stored(operand) if exchanged is None else exchanged

    def written(self, operand: Operand) -> tuple[int, int, int, int]:
        """The address and stride of a result in the bank, and in the step's memory if other
        launches read it."""
        exchanged = self._exchanged(operand)
        if exchanged is None:
            return *self.stored(operand), 0, 0
        outside = operand.tensor.buffer in self.exchange.outside
        return *exchanged, *(self.stored(operand) if outside else (0, 0))

    def _exchanged(self, operand: Operand | None) -> tuple[int, int] | None:
        if operand is None or operand.tensor.buffer not in self.exchange.offsets:
            return None
        tensor = operand.tensor
        offset = self.exchange.offsets[tensor.buffer] + 4 * tensor.start
        return EXCHANGE_MEMORY | offset, tensor.stride


@dataclass(frozen=True, slots=True)
class LaunchOperands:
    """The operands of a tuned launch, found by its ``macros``; ``first`` is the index of its first
    op."""

    ops: Sequence[Op]
    first: int
    macros: Mapping[str, int]

    def operand(self, name: str) -> Operand | None:
        """The operand that a macro names, None where absent."""
        number = self.macros.get(name, ABSENT)
        if number < 0:
            return None
        op, index = self.first + number // OPERANDS_OF_A_PACKET, number % OPERANDS_OF_A_PACKET
        tensor = self.ops[op].operands[index]
        assert tensor is not None
        return Operand(op, index, tensor)

    def needed(self, name: str) -> Operand:
        """The operand that a macro names, which must exist."""
        operand = self.operand(name)
        assert operand is not None, name
        return operand

    def number(self, name: str) -> int | None:
        """The index of the op whose packet a macro names."""
        number = self.macros.get(name, ABSENT)
        return None if number < 0 else self.first + number


def size_of(packet: np.void, op: str, name: str) -> int:
    """A size of a packet."""
    return int(packet["size"][TABLE[op].sizes.index(name)])


def real_of(packet: np.void, op: str, name: str) -> float:
    """A real of a packet."""
    return float(packet["real"][TABLE[op].reals.index(name)])
