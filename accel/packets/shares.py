"""A step divided among devices by rows of its matrices, so that no sum is divided.

Every device computes a share of the rows of each product: columns of its result, each the same sum
in the same order as on one device. What is done column by column behind it is done of the share
alone. Before an op that reads more than that, an ALL_GATHER brings every device the shares of the
others; all other ops every device does whole. Nothing here knows a model: it is found in the ops.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from accel.packets.device_op import ANY, DeviceOp, DeviceOperand
from accel.packets.step import Count, Op, Per, Step, Tensor

GRANULE = 16
"""Rows that stay together: those of a unit of the tuned products, of which no layout has more for
matrices that are divided."""

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
"""Sends ``part``, the columns from ``first`` on of ``whole``, to the same place of every device,
and ends when all their parts are here. Without operands the devices wait for each other."""

BY_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "add": ("a", "b", "y"),
        "scale": ("x", "y"),
        "bias_add": ("x", "bias", "y"),
        "soft_cap": ("x", "y"),
        "swiglu": ("gate", "up", "y"),
        "expert_sum": ("products", "residual", "y"),
        "gated_add": ("residual", "x", "y"),
    }
)
"""Ops whose columns do not know of each other, and their operands that have those columns."""


@dataclass(frozen=True, slots=True)
class Share:
    """Device ``index`` of ``count``."""

    index: int
    count: int

    def of(self, columns: int) -> range:
        """Which of so many columns, or rows of a matrix, are its own."""
        granules = columns // GRANULE
        first = granules * self.index // self.count * GRANULE
        last = granules * (self.index + 1) // self.count * GRANULE
        return range(first, columns if self.index + 1 == self.count else last)

    def divides(self, columns: int) -> bool:
        """Whether every device gets some of them."""
        return columns // GRANULE >= self.count

    def part(self, tensor: Tensor) -> Tensor:
        """Its columns of a tensor."""
        own = self.of(tensor.columns)
        return tensor._replace(start=tensor.start + own.start, columns=len(own))


@dataclass(frozen=True, slots=True)
class SharedStep:
    """What one device does of a step. ``first_rows`` says of ops whose weight is there whole from
    which row on they read it."""

    step: Step
    first_rows: Mapping[int, int]


def divided_weights(steps: Sequence[Step], share: Share) -> frozenset[str]:
    """Matrices of which a device needs its share of the rows alone, in all of ``steps``."""
    divided: set[str] = set()
    whole: set[str] = set()
    for step in steps:
        for op in step.ops:
            for place, tensor in enumerate(op.operands):
                if tensor is not None:
                    alone = place == op.matrix and _has_rows(op, share)
                    (divided if alone else whole).add(tensor.buffer)
    return frozenset(divided - whole)


def share_step(step: Step, share: Share, divided: Collection[str]) -> SharedStep:
    """``step`` as a device does it that holds its share of the rows of the ``divided`` matrices."""
    return _Dividing(step, share, frozenset(divided)).result()


def written_since(ops: Sequence[Op]) -> dict[str, int]:
    """Of each buffer that other devices write to, the op from which on they may: those that wait
    for each other at one ALL_GATHER are all behind the one before."""
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
    """Whether ``op`` is a product by stored matrices with rows for every device."""
    if op.name != "matmul" or op.matrix is None:
        return False
    names = [operand.name for operand in op.device.operands]
    behind = (op.operands[names.index(name)] for name in ("bias", "residual"))
    return share.divides(op.most_sizes()["rows"]) and not any(behind)


@dataclass(slots=True)
class _Dividing:
    """``partial`` are tensors of which this device has its columns so far, with their counts."""

    step: Step
    share: Share
    divided: frozenset[str]
    ops: list[Op] = field(default_factory=list)
    first_rows: dict[int, int] = field(default_factory=dict)
    partial: dict[Tensor, Count] = field(default_factory=dict)

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
        """A share of the rows of one matrix can be taken of it whole; of a stack it cannot."""
        weight = op.operands[op.matrix] if op.matrix is not None else None
        if weight is None or not _has_rows(op, self.share):
            return False
        return weight.buffer in self.divided or op.most_sizes()["places"] == 0

    def _divide_product(self, op: Op) -> None:
        weight = op.operands[op.matrix or 0]
        (place,) = op.written
        y = op.operands[place]
        assert weight is not None
        assert y is not None
        own = self.share.of(y.columns)
        if weight.buffer not in self.divided:
            self.first_rows[len(self.ops)] = own.start
        self.ops.append(self._narrowed(op, {place}, "rows", len(own)))
        self.partial[y] = op.count

    def _stays_partial(self, op: Op) -> bool:
        """Whether ``op`` can be done of a share: its operands are divided alike, or whole."""
        places = self._by_columns(op)
        if not places:
            return False
        width, met = op.most_sizes()["width"], []
        for place, tensor in enumerate(op.operands):
            found = [] if tensor is None else self._overlapping(tensor)
            met += found
            if place in places and tensor is not None and tensor.columns != width:
                return False
            if found and (place not in places or set(found) != {tensor}):
                return False
        return bool(met)

    @staticmethod
    def _by_columns(op: Op) -> set[int]:
        """Places of the operands of which a share is taken."""
        requested = BY_COLUMNS.get(op.name, ())
        return {n for n, operand in enumerate(op.device.operands) if operand.name in requested}

    def _divide_columns(self, op: Op) -> None:
        own = self.share.of(op.most_sizes()["width"])
        self.ops.append(self._narrowed(op, self._by_columns(op), "width", len(own)))
        for place in op.written:
            tensor = op.operands[place]
            assert tensor is not None
            self.partial[tensor] = op.count

    def _narrowed(self, op: Op, places: Collection[int], size: str, number: int) -> Op:
        """``op`` with the share of some operands, and of one size."""
        operands = tuple(
            self.share.part(tensor) if place in places and tensor is not None else tensor
            for place, tensor in enumerate(op.operands)
        )
        at = op.device.sizes.index(size) - 1
        sizes = (*op.sizes[:at], number, *op.sizes[at + 1 :])
        return replace(op, operands=operands, sizes=sizes)

    def _whole(self, op: Op, number: int, *, written: bool) -> None:
        """Have what ``op`` reads there whole. All that somebody reads from here on comes along:
        to wait for each other costs more than to send. What the op writes whole is."""
        read = [
            tensor
            for place, tensor in enumerate(op.operands)
            if tensor is not None and place not in op.written
        ]
        if any(self._overlapping(tensor) for tensor in read):
            requested = self._read_from(number)
            self._gather([t for t in self.partial if any(t.overlaps(one) for one in requested)])
        for place in op.written if written else ():
            tensor = op.operands[place]
            for old in self._overlapping(tensor) if tensor is not None else ():
                del self.partial[old]

    def _read_from(self, number: int) -> list[Tensor]:
        return [
            tensor
            for op in self.step.ops[number:]
            for place, tensor in enumerate(op.operands)
            if tensor is not None and place not in op.written
        ]

    def _overlapping(self, tensor: Tensor) -> list[Tensor]:
        return [one for one in self.partial if one.overlaps(tensor)]

    def _gather(self, tensors: Collection[Tensor]) -> None:
        for tensor in tensors:
            own, count = self.share.of(tensor.columns), self.partial.pop(tensor)
            part = self.share.part(tensor)
            self.ops.append(self._gathering(part, tensor, count, own.start))

    def _gathering(self, part: Tensor | None, whole: Tensor | None, count: Count, first: int) -> Op:
        columns = 0 if part is None else part.columns
        sizes = first, columns, self.share.count
        return Op(ALL_GATHER, (part, whole), (ANY, ANY), count, sizes)


NO_ROWS: Mapping[int, int] = MappingProxyType({})
"""Of a device that is alone."""
