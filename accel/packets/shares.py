"""Divides a step among devices by rows of its matrices, so that no sum is divided.

Every device computes a share of the rows of each product: columns of the result, each with the same
sum in the same order as on one device. Columnwise ops after it work on the share alone. Before an
op that reads more than that, an ALL_GATHER brings every device the shares of the others; every
device computes all other ops whole. Only the ops matter, never the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import MappingProxyType

from accel.packets.device_op import ANY, DeviceOp, DeviceOperand
from accel.packets.step import Count, Op, Per, Step, Tensor

GRANULE = 16
"""Rows that are never divided: those of a unit of the tuned products, the largest group of all
layouts whose matrices are divided."""

ALL_GATHER = DeviceOp(
    "all_gather",
    (DeviceOperand("part", optional=True), DeviceOperand("whole", written=True, optional=True)),
    ("tokens", "first", "columns", "devices"),
    (),
    lambda tokens, columns, **_: tokens * columns,
    False,
    False,
    "all_gather",
)
"""Sends ``part``, the columns from ``first`` on of ``whole``, to the same address range of every
device, and ends when the parts of all have arrived. Without operands the devices only wait for each
other."""

BY_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "add": ("a", "b", "y"),
        "scale": ("x", "y"),
        "bias_add": ("x", "bias", "y"),
        "soft_cap": ("x", "y"),
        "swiglu": ("gate", "up", "y"),
        "expert_bias": ("x", "bias", "y"),
        "expert_sum": ("products", "residual", "y"),
        "gated_add": ("residual", "x", "y"),
    }
)
"""Ops whose columns are independent, and the operands that have those columns."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of device ``index`` of ``count``."""

    index: int
    count: int

    def of(self, columns: int) -> range:
        """The device's own range of ``columns`` columns, or rows of a matrix."""
        granules = columns // GRANULE
        first = granules * self.index // self.count * GRANULE
        last = granules * (self.index + 1) // self.count * GRANULE
        return range(first, columns if self.index + 1 == self.count else last)

    def divides(self, columns: int) -> bool:
        """Whether every device gets at least one granule of ``columns``."""
        return columns // GRANULE >= self.count

    def part(self, tensor: Tensor) -> Tensor:
        """The device's own columns of a tensor."""
        own = self.of(tensor.columns)
        return tensor._replace(start=tensor.start + own.start, columns=len(own))


@dataclass(frozen=True, slots=True)
class SharedStep:
    """The part of a step that one device executes. ``first_rows`` gives, for ops whose weight is
    there whole, the first row they read."""

    step: Step
    first_rows: Mapping[int, int]


def divided_weights(steps: Sequence[Step], share: Share) -> frozenset[str]:
    """Matrices of which a device needs only its share of the rows in all of ``steps``."""
    divided: set[str] = set()
    whole: set[str] = set()
    for step in steps:
        for op in step.ops:
            for index, tensor in enumerate(op.operands):
                if tensor is not None:
                    alone = index == op.matrix and _has_rows(op, share)
                    (divided if alone else whole).add(tensor.buffer)
    return frozenset(divided - whole)


def share_step(step: Step, share: Share, divided: Collection[str]) -> SharedStep:
    """The part of ``step`` for a device that has its share of the rows of the ``divided``
    matrices."""
    return _Dividing(step, share, frozenset(divided)).result()


def written_since(ops: Sequence[Op]) -> dict[str, int]:
    """For each buffer that other devices write, the index of the op from which on they may.

    Devices that wait for each other at one ALL_GATHER are all past the one before.
    """
    since: dict[str, int] = {}
    before = run = 0
    for number, op in enumerate(ops):
        if op.device is not ALL_GATHER:
            continue
        if number == 0 or ops[number - 1].device is not ALL_GATHER:
            before, run = run, number
        for name in op.results():
            since[name] = min(since.get(name, before), before)
    return since


def _has_rows(op: Op, share: Share) -> bool:
    """Whether ``op`` is a product whose stored matrix has rows for every device."""
    if op.name != "matmul" or op.matrix is None:
        return False
    names = [operand.name for operand in op.device.operands]
    behind = (op.operands[names.index(name)] for name in ("bias", "residual"))
    return share.divides(op.most_sizes()["rows"]) and not any(behind)


@dataclass(slots=True)
class _Dividing:
    """Builds the part of a step. ``partial`` are the tensors of which this device has only its own
    columns so far, with their counts, and ``of_buffer`` the same by buffer. ``reads`` has for each
    buffer what is read of it, in order, with the index of the op."""

    step: Step
    share: Share
    divided: frozenset[str]
    ops: list[Op] = field(default_factory=list)
    first_rows: dict[int, int] = field(default_factory=dict)
    partial: dict[Tensor, Count] = field(default_factory=dict)
    reads: defaultdict[str, list[tuple[int, Tensor]]] = field(init=False)
    of_buffer: defaultdict[str, dict[Tensor, None]] = field(init=False)

    def __post_init__(self) -> None:
        self.reads, self.of_buffer = defaultdict(list), defaultdict(dict)
        for number, op in enumerate(self.step.ops):
            for index, tensor in enumerate(op.operands):
                if tensor is not None and index not in op.written:
                    self.reads[tensor.buffer].append((number, tensor))

    def result(self) -> SharedStep:
        for number, op in enumerate(self.step.ops):
            if self._is_divided(op):
                self._whole(op, number, written=False)
                self._divide_product(op)
            elif self._stays_partial(op):
                self._divide_columns(op)
            else:
                self._whole(op, number, written=True)
                self.ops.append(op)
        outside = [t for t in self.partial if t.buffer not in self.step.scratch]
        self._gather(outside)
        if any(op.device is ALL_GATHER for op in self.ops):
            self.ops.insert(0, self._gathering(None, None, Count(0, Per.STEP, 0), 0))
            self.first_rows = {number + 1: row for number, row in self.first_rows.items()}
        return SharedStep(Step(self.ops, dict(self.step.scratch)), self.first_rows)

    def _is_divided(self, op: Op) -> bool:
        """Whether ``op`` can be divided: one matrix can be whole on the device, a stack cannot."""
        weight = op.operands[op.matrix] if op.matrix is not None else None
        if weight is None or not _has_rows(op, self.share):
            return False
        return weight.buffer in self.divided or op.most_sizes()["places"] == 0

    def _divide_product(self, op: Op) -> None:
        weight = op.operands[op.matrix or 0]
        (index,) = op.written
        y = op.operands[index]
        assert weight is not None
        assert y is not None
        own = self.share.of(y.columns)
        if weight.buffer not in self.divided:
            self.first_rows[len(self.ops)] = own.start
        self.ops.append(self._narrowed(op, {index}, "rows", len(own)))
        self._add(y, op.count)

    def _stays_partial(self, op: Op) -> bool:
        """Whether ``op`` can work on a share: its operands are divided alike, or whole."""
        indices = self._by_columns(op)
        if not indices:
            return False
        width, met = op.most_sizes()["width"], []
        for index, tensor in enumerate(op.operands):
            found = [] if tensor is None else self._overlapping(tensor)
            met += found
            if index in indices and tensor is not None and tensor.columns != width:
                return False
            if found and (index not in indices or set(found) != {tensor}):
                return False
        return bool(met)

    @staticmethod
    def _by_columns(op: Op) -> set[int]:
        """Indices of the operands of which a share is taken."""
        requested = BY_COLUMNS.get(op.name, ())
        return {n for n, operand in enumerate(op.device.operands) if operand.name in requested}

    def _divide_columns(self, op: Op) -> None:
        own = self.share.of(op.most_sizes()["width"])
        self.ops.append(self._narrowed(op, self._by_columns(op), "width", len(own)))
        for index in op.written:
            tensor = op.operands[index]
            assert tensor is not None
            self._add(tensor, op.count)

    def _narrowed(self, op: Op, indices: Collection[int], size: str, number: int) -> Op:
        """``op`` with the share of some operands, and with one size changed to ``number``."""
        operands = tuple(
            self.share.part(tensor) if index in indices and tensor is not None else tensor
            for index, tensor in enumerate(op.operands)
        )
        at = op.device.sizes.index(size) - 1
        sizes = (*op.sizes[:at], number, *op.sizes[at + 1 :])
        return replace(op, operands=operands, sizes=sizes)

    def _whole(self, op: Op, number: int, *, written: bool) -> None:
        """Gather what ``op`` reads, and whatever any later op reads, since waiting for other
        devices costs more than sending. If ``written``, the results of ``op`` are whole from now
        on."""
        read = [
            tensor
            for index, tensor in enumerate(op.operands)
            if tensor is not None and index not in op.written
        ]
        if any(self._overlapping(tensor) for tensor in read):
            self._gather([tensor for tensor in self.partial if self._is_read(tensor, number)])
        for index in op.written if written else ():
            tensor = op.operands[index]
            for old in self._overlapping(tensor) if tensor is not None else ():
                self._taken(old)

    def _is_read(self, tensor: Tensor, number: int) -> bool:
        """Whether op ``number`` or a later one reads some of ``tensor``."""
        later = takewhile(lambda read: read[0] >= number, reversed(self.reads[tensor.buffer]))
        return any(tensor.overlaps(one) for _, one in later)

    def _overlapping(self, tensor: Tensor) -> list[Tensor]:
        return [one for one in self.of_buffer[tensor.buffer] if one.overlaps(tensor)]

    def _add(self, tensor: Tensor, count: Count) -> None:
        self.partial[tensor] = count
        self.of_buffer[tensor.buffer][tensor] = None

    def _taken(self, tensor: Tensor) -> Count:
        """The count of a tensor that is not partial any more."""
        del self.of_buffer[tensor.buffer][tensor]
        return self.partial.pop(tensor)

    def _gather(self, tensors: Collection[Tensor]) -> None:
        for tensor in tensors:
            own, count = self.share.of(tensor.columns), self._taken(tensor)
            part = self.share.part(tensor)
            self.ops.append(self._gathering(part, tensor, count, own.start))

    def _gathering(self, part: Tensor | None, whole: Tensor | None, count: Count, first: int) -> Op:
        columns = 0 if part is None else part.columns
        sizes = first, columns, self.share.count
        return Op(ALL_GATHER, (part, whole), (ANY, ANY), count, sizes)


NO_ROWS: Mapping[int, int] = MappingProxyType({})
"""The ``first_rows`` of a device that is alone."""
