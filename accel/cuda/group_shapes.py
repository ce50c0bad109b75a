"""Chooses how products of warp groups are divided into blocks: rows, tokens, columns and stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapreplace
from itertools import product

from accel.cuda.device import Device
from accel.cuda.packed_tiles import UNIT_ROWS, unit_bytes, unit_count
from contract.dtypes import Q5_K, Q6_K, DType

GROUP_WARPS = 4
GROUP_ROWS = GROUP_WARPS * UNIT_ROWS
FOUR_SUM_FORMATS = (Q6_K,)
FOUR_SUM_GROUPS = 2
"""Most groups of a block whose registers have room for four sums at once."""
MAX_SPLIT_TOKENS = 64
"""Most tokens for which groups split columns; with more there are enough blocks."""
MAX_PARTED_TOKENS = 384
"""Most tokens for which blocks share rows; with more there are enough blocks, and the partial sums
would be large."""
TOKEN_BYTES = 512
"""Bytes of a token's unit: two planes."""
SUM_BYTES = 32
BARRIER_BYTES = 8
SPAN_UNITS = 4
FOLD_TIME = 20
"""Time that folding the spans of MAX_SPLIT_TOKENS adds to packing, in tenths of a microsecond."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of a block: its warp groups, tokens, and stages of what is read of a unit.

    The groups of a ``split`` block share rows and split the columns, and each has its own stages.
    ``parts`` blocks share rows likewise."""

    groups: int
    tokens: int
    split: bool
    stages: int = 2
    parts: int = 1

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return GROUP_ROWS * (1 if self.split else self.groups)

    def row_blocks(self, rows: Sequence[int]) -> int:
        """Blocks for all matrices, whose tiles are numbered consecutively."""
        tiles = sum(-(-of_matrix // UNIT_ROWS) for of_matrix in rows)
        return -(-tiles * UNIT_ROWS // self.rows)

    def shared_bytes(self, dtype: DType) -> int:
        """Shared memory: stages with their barriers, and totals if groups have rows of their
        own."""
        of_tokens = self.tokens * (TOKEN_BYTES + SUM_BYTES + 4)
        stage = of_tokens + self.rows // UNIT_ROWS * unit_bytes(dtype) + BARRIER_BYTES
        stages = self.stages * stage
        return stages * self.groups if self.split else stages + 4 * self.rows * self.tokens

    def work(self, tokens: int) -> int:
        """Blocks of tokens. Decode tokens that join a whole chunk of a prompt seldom fill one
        more."""
        return -(-tokens // self.tokens) if self.split else max(1, tokens // self.tokens)


WARP_TOKENS = 16
"""Fewest tokens of a product of a group; with fewer it takes hardly less time."""
SHAPES = {
    GroupShape(4, 32, True): 8,
    GroupShape(4, 16, True, 3): 7,
    GroupShape(4, 16, True): 7,
    GroupShape(2, 16, True, 3): 8,
    GroupShape(4, 64, False): 38,
    GroupShape(3, 64, False): 30,
    GroupShape(2, 64, False): 23,
}
"""Shapes, and each one's time for a unit of columns in tenths of a microsecond on an H200."""
FOUR_SUMS_TIME = 30
"""The time for two groups that make four sums each."""
WIDE_FORMATS = (Q5_K,)
WIDE_TIMES = {4: 55, 3: 36, 2: 30}
"""Times for codes of five bits, by the number of groups that have rows of their own."""


def by_single_warps(dtype: DType, shape: GroupShape) -> bool:
    """Whether each warp of a group multiplies by itself: split groups lack registers for the sums
    of Q6_K."""
    return shape.split and (shape.tokens <= WARP_TOKENS or dtype in FOUR_SUM_FORMATS)


def span_count(columns: int) -> int:
    """Spans of a row; the last may be shorter."""
    return -(-unit_count(columns) // SPAN_UNITS)


def group_shape(
    dtype: DType,
    columns: int,
    tokens: int,
    rows: Sequence[int],
    device: Device,
    parted: bool = False,
) -> GroupShape:
    """The fastest shape, when each multiprocessor runs one block at a time.

    With ``parted`` blocks may share rows, as long as every group has a span."""

    def time(shape: GroupShape) -> int:
        return _time(shape, dtype, columns, tokens, rows, device)

    shapes = _fitting(dtype, tokens, device)
    if parted and tokens <= MAX_PARTED_TOKENS:
        shapes += _parted(shapes, span_count(columns))
    return min(shapes, key=time)


def parted_shape(
    dtype: DType, columns: int, tokens: int, rows: Sequence[int], device: Device
) -> GroupShape:
    """The fastest shape whose blocks share rows, of two spans at least."""
    shapes = _parted(_fitting(dtype, tokens, device), span_count(columns))
    return min(shapes, key=lambda shape: _time(shape, dtype, columns, tokens, rows, device))


def group_time(dtype: DType, columns: int, tokens: int, rows: Sequence[int], device: Device) -> int:
    """The time of the fastest shape, in tenths of a microsecond on an H200."""
    shape = group_shape(dtype, columns, tokens, rows, device)
    return _time(shape, dtype, columns, tokens, rows, device)


def _time(
    shape: GroupShape, dtype: DType, columns: int, tokens: int, rows: Sequence[int], device: Device
) -> int:
    blocks = shape.row_blocks(rows) * shape.work(tokens) * shape.parts
    fold = _fold_time(tokens) if shape.parts > 1 else 0
    return -(-blocks // device.multiprocessors) * _block_time(shape, dtype, columns) + fold


@cache
def overlapping_shapes(
    columns: int,
    tokens: int,
    rows: tuple[tuple[DType, tuple[int, ...]], ...],
    device: Device,
    parted: bool = False,
) -> tuple[GroupShape, ...]:
    """The shapes of launches with these ``rows`` that overlap, the fastest together: a block begins
    on the multiprocessor that is free first.

    With ``parted`` blocks of all launches may share rows."""

    def time(shapes: tuple[GroupShape, ...]) -> int:
        free = [0] * device.multiprocessors
        for shape, (dtype, of_launch) in zip(shapes, rows, strict=True):
            each = _block_time(shape, dtype, columns)
            for _ in range(shape.row_blocks(of_launch) * shape.work(tokens) * shape.parts):
                heapreplace(free, free[0] + each)
        return max(free) + (_fold_time(tokens) if shapes[0].parts > 1 else 0)

    fitting = [_fitting(dtype, tokens, device) for dtype, _ in rows]
    every = list(product(*fitting))
    if parted and tokens <= MAX_PARTED_TOKENS:
        every += product(*(_parted(shapes, span_count(columns)) for shapes in fitting))
    return min(every, key=time)


def _parted(shapes: Sequence[GroupShape], spans: int) -> list[GroupShape]:
    """Shapes whose blocks share rows of ``spans`` spans, with at least one for each group."""
    return [
        replace(shape, parts=parts)
        for shape in shapes
        for parts in range(2, spans // (shape.groups if shape.split else 1) + 1)
    ]


def _fold_time(tokens: int) -> int:
    return FOLD_TIME * -(-tokens // MAX_SPLIT_TOKENS)


def _block_time(shape: GroupShape, dtype: DType, columns: int) -> int:
    of_unit = SHAPES[replace(shape, parts=1)]
    if dtype in FOUR_SUM_FORMATS and not shape.split:
        of_unit = FOUR_SUMS_TIME
    elif dtype in WIDE_FORMATS and not shape.split:
        of_unit = WIDE_TIMES[shape.groups]
    return -(-span_count(columns) // shape.parts) * SPAN_UNITS * of_unit


def _fitting(dtype: DType, tokens: int, device: Device) -> list[GroupShape]:
    return [shape for shape in SHAPES if _fits(shape, dtype, tokens, device)]


def _fits(shape: GroupShape, dtype: DType, tokens: int, device: Device) -> bool:
    if shape.shared_bytes(dtype) > device.shared_bytes:
        return False
    if shape.split:
        return tokens <= MAX_SPLIT_TOKENS
    return dtype not in FOUR_SUM_FORMATS or shape.groups <= FOUR_SUM_GROUPS
