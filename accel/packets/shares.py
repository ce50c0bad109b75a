"""Divides a step among devices by the rows of its matrices, so that no sum is divided (tensor
parallelism).

Every device computes a share of the rows of each product: columns of the result, each the same sum
in the same order as on one device. Elementwise ops after it work on the share. Before an op that
reads more, an ALL_GATHER sends every device the shares of the others. All other ops are computed
whole by every device. This depends on the ops alone, never on the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from accel.packets.device_op import ANY, DeviceOp, DeviceOperand
from accel.packets.head_shares import (
    GRANULE,
    NO_PAGES,
    HeadCopy,
    Pages,
    copy_of_heads,
    joined,
    of_own_heads,
    operands_of_heads,
    ops_of_heads,
)
from accel.packets.step import Count, Op, Per, Step, Tensor

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
"""Sends ``part``, the columns of ``whole`` from ``first`` on, to the same addresses on every
device, and ends once the parts of all devices have arrived. Without operands it is a barrier of the
devices."""

BY_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "add": ("a", "b", "y"),
    "scale": ("x", "y"),
    "bias_add": ("x", "bias", "y"),
    "soft_cap": ("x", "y"),
    "xielu": ("x", "y"),
    "swiglu": ("gate", "up", "y"),
    "expert_bias": ("x", "bias", "y"),
    "expert_sum": ("products", "residual", "y"),
    "gated_add": ("residual", "x", "y"),
}
"""Ops with independent columns, and their operands that have these columns."""
FEW, SMALL_ROWS = 4, 1 << 14
"""Tokens of a step, and rows of a matrix, with which a meeting takes longer than half a product."""
MAX_AHEAD = 16
"""Number of ops searched for one that need not wait for other devices."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of device ``index`` of ``count``."""

    index: int
    count: int

    def of(self, columns: int) -> range:
        """The device's range of ``columns`` columns, or rows of a matrix."""
        granules = columns // GRANULE
        first = granules * self.index // self.count * GRANULE
        last = granules * (self.index + 1) // self.count * GRANULE
        return range(first, columns if self.index + 1 == self.count else last)

    def divides(self, columns: int) -> bool:
        """Whether every device gets at least one granule of ``columns``."""
        return columns // GRANULE >= self.count

    def part(self, tensor: Tensor) -> Tensor:
        """The device's columns of a tensor."""
        own = self.of(tensor.columns)
        return tensor._replace(start=tensor.start + own.start, columns=len(own))


@dataclass(frozen=True, slots=True)
class SharedStep:
    """The part of a step that one device executes. ``first_rows`` gives, for ops whose weight is
    whole on the device, the first row they read."""

    step: Step
    first_rows: Mapping[int, int]


def divided_weights(steps: Sequence[Step], share: Share, pages: Pages = NO_PAGES) -> frozenset[str]:
    """The matrices of which a device needs only its share of the rows in all ``steps``; ``pages``
    as in ``share_step``."""
    divided: set[str] = set()
    whole: set[str] = set()
    for step in steps:
        of_heads = ops_of_heads(step.ops, pages, share.count)
        computed_whole = _computed_whole(step.ops, of_heads)
        for op in step.ops:
            for index, tensor in enumerate(op.operands):
                if tensor is not None:
                    alone = index == op.matrix and _has_rows(op, share, computed_whole)
                    (divided if alone else whole).add(tensor.buffer)
    return frozenset(divided - whole)


def share_step(
    step: Step, share: Share, divided: Collection[str], pages: Pages = NO_PAGES
) -> SharedStep:
    """The part of ``step`` for a device that has its share of the rows of the ``divided`` matrices,
    and of the KV buffers ``pages`` its own heads."""
    of_heads = ops_of_heads(step.ops, pages, share.count)
    return _Dividing(step, share, frozenset(divided), pages, of_heads).result()


def written_since(ops: Sequence[Op]) -> dict[str, int]:
    """For each buffer that other devices write, the index of the first op after which they may.

    Devices that wait at one ALL_GATHER have all passed the one before."""
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


def _computed_whole(ops: Sequence[Op], of_heads: Collection[int]) -> frozenset[str]:
    """Buffers of results of products that are not divided: those from which experts are chosen,
    which are small, while the choice waits for all of them; and for few tokens all small results
    but those of experts and of ops ``of_heads``, since waiting for other devices takes longer than
    half a product."""
    chosen = [op for op in ops if op.name == "expert_topk"]
    found = {tensor.buffer for op in chosen for tensor in op.read_tensors()}
    if chosen and chosen[0].count.maximum <= FEW:
        products = [op for op in ops if op.name == "matmul"]
        inputs = {op.operands[0] for op in products if op.max_sizes()["row_pairs"]}
        added = {t.buffer for op in ops if op.name == "gated_add" for t in op.read_tensors()}
        of_own = {tensor for number in of_heads for tensor in operands_of_heads(ops[number])}
        for op in products:
            small = op.max_sizes()["rows"] <= SMALL_ROWS and op.operands[0] not in inputs
            if small and of_own.isdisjoint(op.operands[at] for at in op.written):
                found |= op.results() - added
    return frozenset(found)


def _has_rows(op: Op, share: Share, whole: frozenset[str]) -> bool:
    """Whether ``op`` is a product whose stored matrix has rows for every device and whose results
    are in none of the buffers ``whole``."""
    if op.name != "matmul" or op.matrix is None or not whole.isdisjoint(op.results()):
        return False
    alone = op.operand("bias") is None and op.operand("residual") is None
    return alone and share.divides(op.max_sizes()["rows"])


@dataclass(slots=True)
class _Dividing:
    """Builds the part of a step.

    ``left`` are the ops not processed yet, by index. ``partial`` are the tensors of which this
    device has only its own columns, with their counts; ``of_buffer`` has the same by buffer.
    ``reads`` lists for each buffer the tensors read of it, each with the index of the op. The ops
    ``of_heads`` are divided by heads; of ``copied`` pages the heads are gathered."""

    step: Step
    share: Share
    divided: frozenset[str]
    pages: Pages
    of_heads: frozenset[int]
    ops: list[Op] = field(default_factory=list)
    copied: list[HeadCopy] = field(default_factory=list)
    first_rows: dict[int, int] = field(default_factory=dict)
    partial: dict[Tensor, Count] = field(default_factory=dict)
    left: dict[int, Op] = field(init=False)
    computed_whole: frozenset[str] = field(init=False)
    reads: defaultdict[str, list[tuple[int, Tensor]]] = field(init=False)
    of_buffer: defaultdict[str, dict[Tensor, None]] = field(init=False)

    def __post_init__(self) -> None:
        self.reads, self.of_buffer = defaultdict(list), defaultdict(dict)
        self.left = dict(enumerate(self.step.ops))
        self.computed_whole = _computed_whole(self.step.ops, self.of_heads)
        for number, op in self.left.items():
            for tensor in op.read_tensors():
                self.reads[tensor.buffer].append((number, tensor))

    def result(self) -> SharedStep:
        while self.left:
            number = self._next()
            op = self.left[number]
            copy = copy_of_heads(op, self.pages, self.share.index, self.share.count)
            if number in self.of_heads:
                self._divide_heads(number)
            elif copy is not None:
                self._copy_heads(copy)
            elif self._is_divided(op):
                self._gather_operands(op, written=False)
                self._divide_product(op)
            elif self._stays_partial(op):
                self._divide_columns(op)
            else:
                self._gather_operands(op, written=True)
                self.ops.append(op)
            del self.left[number]
        outside = [t for t in self.partial if t.buffer not in self.step.scratch]
        self._gather(outside)
        self.ops += [self._gathering_copy(copy) for copy in joined(self.copied)]
        if any(op.device is ALL_GATHER for op in self.ops):
            self.ops.insert(0, self._gathering(None, None, Count(0, Per.STEP, 0), 0))
            self.first_rows = {number + 1: row for number, row in self.first_rows.items()}
        return SharedStep(Step(self.ops, dict(self.step.scratch)), self.first_rows)

    def _next(self) -> int:
        """The index of the first op left. If it would wait for other devices: of a product or
        elementwise op after it that neither waits nor depends on the ops it overtakes, so that
        several tensors are gathered together."""
        first, *others = islice(self.left.items(), MAX_AHEAD)
        if first[0] in self.of_heads or not self._waits(first[1]):
            return first[0]
        read, written = set[str](), set[str]()
        passed = first[1]
        for number, op in others:
            read.update(tensor.buffer for tensor in passed.read_tensors())
            written.update(passed.results())
            passed = op
            results, sources = set(op.results()), {tensor.buffer for tensor in op.read_tensors()}
            if op.name != "matmul" and op.name not in BY_COLUMNS:
                continue
            if results & (read | written) or sources & written or self._waits(op):
                continue
            return number
        return first[0]

    def _waits(self, op: Op) -> bool:
        """Whether ``op`` reads a tensor of which other devices have a share."""
        missing = any(self._overlapping(tensor) for tensor in op.read_tensors())
        return missing and (self._is_divided(op) or not self._stays_partial(op))

    def _is_divided(self, op: Op) -> bool:
        """Whether ``op`` can be divided: a single matrix may be whole here, a stack may not."""
        weight = op.operands[op.matrix] if op.matrix is not None else None
        if weight is None or not _has_rows(op, self.share, self.computed_whole):
            return False
        return weight.buffer in self.divided or op.max_sizes()["row_pairs"] == 0

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
        """Whether ``op`` can work on a share: its operands are divided equally, or whole."""
        indices = self._by_columns(op)
        if not indices:
            return False
        width, met = op.max_sizes()["width"], []
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
        own = self.share.of(op.max_sizes()["width"])
        self.ops.append(self._narrowed(op, self._by_columns(op), "width", len(own)))
        for index in op.written:
            tensor = op.operands[index]
            assert tensor is not None
            self._add(tensor, op.count)

    def _divide_heads(self, number: int) -> None:
        """What the device makes of its own heads stays there. What it needs of others is gathered
        before the first of these ops, so that no gather comes between them and attention."""
        run = takewhile(lambda at: at in self.of_heads, islice(self.left, MAX_AHEAD))
        read = [tensor for at in run for tensor in self.left[at].read_tensors()]
        near = (one for tensor in read for one in self._overlapping(tensor) if one != tensor)
        self._gather(list(dict.fromkeys(near)))
        op = self.left[number]
        self.ops.append(of_own_heads(op, self.share.index, self.share.count))
        for tensor in operands_of_heads(op):
            if tensor.buffer in op.results():
                self._add(tensor, op.count)

    def _copy_heads(self, copy: HeadCopy) -> None:
        self.ops.append(copy.op)
        self.copied += [copy] if copy.whole is not None else []

    def _gathering_copy(self, copy: HeadCopy) -> Op:
        assert copy.part is not None
        assert copy.whole is not None
        first, count = copy.part.start - copy.whole.start, copy.op.count.times(copy.rows)
        return self._gathering(copy.part, copy.whole, count, first)

    def _narrowed(self, op: Op, indices: Collection[int], size: str, number: int) -> Op:
        """``op`` with the share of some operands, and with one size changed to ``number``."""
        operands = tuple(
            self.share.part(tensor) if index in indices and tensor is not None else tensor
            for index, tensor in enumerate(op.operands)
        )
        at = op.device.sizes.index(size) - 1
        sizes = (*op.sizes[:at], number, *op.sizes[at + 1 :])
        return replace(op, operands=operands, sizes=sizes)

    def _gather_operands(self, op: Op, *, written: bool) -> None:
        """Gather what ``op`` reads, and what any later op reads, since waiting for other devices
        costs more than sending. If ``written``, the results of ``op`` are whole from now on."""
        if any(self._overlapping(tensor) for tensor in op.read_tensors()):
            self._gather([tensor for tensor in self.partial if self._is_read(tensor)])
            for unread in [one for one in self.partial if one.buffer in self.step.scratch]:
                self._take_partial(unread)
        for index in op.written if written else ():
            tensor = op.operands[index]
            for old in self._overlapping(tensor) if tensor is not None else ():
                self._take_partial(old)

    def _is_read(self, tensor: Tensor) -> bool:
        """Whether an op left reads part of ``tensor``."""
        first = next(iter(self.left))
        later = takewhile(lambda read: read[0] >= first, reversed(self.reads[tensor.buffer]))
        return any(number in self.left and tensor.overlaps(one) for number, one in later)

    def _overlapping(self, tensor: Tensor) -> list[Tensor]:
        return [one for one in self.of_buffer.get(tensor.buffer, ()) if one.overlaps(tensor)]

    def _add(self, tensor: Tensor, count: Count) -> None:
        self.partial[tensor] = count
        self.of_buffer[tensor.buffer][tensor] = None

    def _take_partial(self, tensor: Tensor) -> Count:
        """Remove a tensor from the partial ones, and return its count."""
        del self.of_buffer[tensor.buffer][tensor]
        return self.partial.pop(tensor)

    def _gather(self, tensors: Collection[Tensor]) -> None:
        for tensor in tensors:
            own, count = self.share.of(tensor.columns), self._take_partial(tensor)
            part = self.share.part(tensor)
            self.ops.append(self._gathering(part, tensor, count, own.start))

    def _gathering(self, part: Tensor | None, whole: Tensor | None, count: Count, first: int) -> Op:
        columns = 0 if part is None else part.columns
        sizes = first, columns, self.share.count
        return Op(ALL_GATHER, (part, whole), (ANY, ANY), count, sizes)


NO_ROWS: Mapping[int, int] = {}
"""The ``first_rows`` of a device that is alone."""
