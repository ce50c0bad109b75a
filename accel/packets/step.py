"""A lowered step before it has addresses: ops over tensors, and how each divides its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import IntEnum
from typing import NamedTuple

from accel.packets.device_op import DeviceOp, Split, pieces
from contract.dtypes import DType
from contract.lazy_dataclass import dataclass

PRODUCTS = (
    *("matmul", "matmul_row", "matmul_tiles", "matmul_wide", "matmul_narrow", "matmul_few"),
    *("norm_row", "gate_row", "expand_weight"),
)
"""Ops that multiply by a stored matrix, or convert one for ops that do."""


class Per(IntEnum):
    """What the count of an op grows with: the value of ``packet->counted``."""

    STEP = 0
    """Nothing: the count is the same in every step."""
    TOKEN = 1
    ROW = 2


@dataclass(frozen=True, slots=True)
class Count:
    """``multiplier`` times the tokens or rows of a step; ``maximum`` in the largest step."""

    multiplier: int
    per: Per
    maximum: int

    def times(self, number: int) -> Count:
        """``number`` times this count."""
        return Count(self.multiplier * number, self.per, self.maximum * number)


class Tensor(NamedTuple):
    """Columns ``[start, start + columns)`` of a row-major buffer of ``item_bytes`` elements."""

    buffer: str
    start: int
    columns: int
    stride: int
    item_bytes: int = 4

    @property
    def stop(self) -> int:
        """One past the last column."""
        return self.start + self.columns

    def begins_at(self, elements: int) -> bool:
        """Whether every row begins at a multiple of so many elements."""
        return self.start % elements == 0 and self.stride % elements == 0

    def overlaps(self, other: Tensor) -> bool:
        """True when the two tensors may share an element; those with rows of different lengths may,
        wherever their columns are."""
        if self.buffer != other.buffer or self.stride != other.stride:
            return self.buffer == other.buffer
        return self.start < other.stop and other.start < self.stop


class Touch(NamedTuple):
    """An access of an op to one tensor, and how workers divide it.

    ``everyone``: every worker computes the whole op."""

    tensor: Tensor
    split: Split
    writes: bool = False
    everyone: bool = False

    def safe_after(self, earlier: Touch) -> bool:
        """Whether no worker accesses an element that another worker accessed in ``earlier``."""
        if not (self.writes or earlier.writes) or not self.tensor.overlaps(earlier.tensor):
            return True
        if earlier.everyone:
            return not self.writes
        same_part = self.tensor == earlier.tensor and self.split is earlier.split
        return same_part and self.split is not Split.ANY and not self.everyone


@dataclass(slots=True)
class Op:
    """One op of the step, in the order of the graph.

    ``device`` is its row of the table; ``operands`` are in that order, None if absent; ``sizes``
    are those after the count. ``splits`` says how the work divides each operand. ``private`` marks
    an op so cheap that every worker may compute the whole. ``matrix`` is the index of the stored
    weights among the operands."""

    device: DeviceOp
    operands: tuple[Tensor | None, ...]
    splits: tuple[Split, ...]
    count: Count
    sizes: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()
    dtype: DType | None = None
    private: bool = False
    matrix: int | None = None

    @property
    def name(self) -> str:
        """The op's name in the table."""
        return self.device.name

    @property
    def written(self) -> tuple[int, ...]:
        """Indices of the results among the operands."""
        return self.device.written

    @property
    def matrices(self) -> tuple[int, ...]:
        """Indices of all stored weights among the operands."""
        return self.device.matrices if self.matrix is not None else ()

    @property
    def by_columns(self) -> bool:
        """Whether the op may divide columns instead of rows."""
        return self.device.by_columns

    def max_sizes(self) -> dict[str, int]:
        """Every size by name, with the largest count."""
        return dict(zip(self.device.sizes, (self.count.maximum, *self.sizes), strict=True))

    def operand(self, name: str) -> Tensor | None:
        """The operand with this name."""
        return self.operands[self.device.index_of[name]]

    def launch_groups(self, group_size: int, max_groups: int) -> int:
        """Work-groups of a launch, from 1 to ``max_groups``, on a device that is not a CPU.

        Any number gives the right result; this one is fast."""
        dtype = self.dtype.ggml_id if self.dtype is not None else 0
        units = self.device.units(dtype=dtype, **self.max_sizes())
        groups = units if self.device.by_groups else pieces(units, group_size)
        return max(1, min(groups, max_groups))

    def touches(self, columns: bool = False, everyone: bool = False) -> list[Touch]:
        """The accesses of the op if it divides rows, or ``columns``, or ``everyone`` repeats it."""
        written = self.written
        return [
            Touch(tensor, Split.COLUMNS if columns else split, index in written, everyone)
            for index, (tensor, split) in enumerate(zip(self.operands, self.splits, strict=True))
            if tensor is not None
        ]

    def read_tensors(self) -> list[Tensor]:
        """The tensors that the op does not write."""
        written = self.written
        return [
            tensor
            for index, tensor in enumerate(self.operands)
            if tensor is not None and index not in written
        ]

    def results(self) -> set[str]:
        """Names of the buffers the op writes."""
        operands = (self.operands[index] for index in self.written)
        return {tensor.buffer for tensor in operands if tensor is not None}


@dataclass(slots=True)
class Step:
    """All ops of a graph for one shape bucket. ``scratch`` has the bytes of step-local buffers."""

    ops: list[Op] = field(default_factory=list)
    scratch: dict[str, int] = field(default_factory=dict)


class OpSchedule(NamedTuple):
    """How one op runs. ``wait``: at a barrier before it. ``everyone``: every worker computes the
    whole op. ``columns``: workers divide its columns. ``level`` counts barriers or launches before
    it."""

    wait: bool
    everyone: bool
    columns: bool
    level: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """How each op runs, in op order, and the offsets of step-local buffers.

    ``shared`` and ``own`` are byte offsets in the scratch memory of all workers and of each worker;
    every buffer is in exactly one of them."""

    op_schedules: tuple[OpSchedule, ...]
    shared: Mapping[str, int]
    shared_bytes: int
    own: Mapping[str, int]
    own_bytes: int

    @property
    def barriers(self) -> int:
        """The number of barriers in a step, at which all workers meet."""
        return sum(op_schedule.wait for op_schedule in self.op_schedules)
