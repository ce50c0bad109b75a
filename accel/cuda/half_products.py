"""Products of prompts in binary16, of a format whose codes times their scales are sums of two small
integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accel.cuda import group_shapes
from accel.cuda.device import Device
from accel.cuda.packed_tiles import UNIT_ROWS, unit_bytes
from accel.cuda.tuned import KernelLaunch
from contract.dtypes import Q5_K, DType

HALF_FORMATS = (Q5_K,)
HALF_TOKENS = 128
SHAPE = group_shapes.GroupShape(2, HALF_TOKENS, split=False)
QUARTERS = 4
"""Parts of a unit of the tokens, which are loaded one after the other."""
QUARTER_STAGES = 6
THREADS = (SHAPE.groups + 1) * group_shapes.GROUP_WARPS * 32
"""Of the groups that multiply, and of one that loads."""
HALF_TIME = 42
"""The time of a block for a unit of columns in tenths of a microsecond on an H200."""


def halves_are_faster(
    dtype: DType, columns: int, tokens: int, rows: Sequence[int], device: Device
) -> bool:
    """Whether products of a prompt in binary16 take less time than those of integers."""
    if dtype not in HALF_FORMATS or tokens <= group_shapes.MAX_PARTED_TOKENS:
        return False
    if _shared_bytes(dtype) > device.shared_bytes:
        return False
    turns = -(-SHAPE.row_blocks(rows) * SHAPE.work(tokens) // device.multiprocessors)
    halves = turns * group_shapes.span_count(columns) * group_shapes.SPAN_UNITS * HALF_TIME
    return halves < group_shapes.group_time(dtype, columns, tokens, rows, device)


def half_launch(
    dtype: DType, tokens: int, rows: Sequence[int], device: Device, macros: Mapping[str, int]
) -> KernelLaunch:
    """The products of packed tokens, a block after the other; ``macros`` are those of the
    operands."""
    macros = {
        "WARP_GROUPS": SHAPE.groups,
        "BLOCK_TOKENS": HALF_TOKENS,
        "SPLIT": 0,
        "PARTS": 1,
        "STAGES": SHAPE.stages,
        "QUARTER_STAGES": QUARTER_STAGES,
        **macros,
    }
    grid = (min(SHAPE.row_blocks(rows) * -(-tokens // HALF_TOKENS), device.multiprocessors),)
    return KernelLaunch("half_groups", grid, THREADS, _shared_bytes(dtype), macros)


def _shared_bytes(dtype: DType) -> int:
    """Shared memory: quarters of units of the tokens, units of weights with their tokens' sums and
    scales, totals, and barriers."""
    quarters = QUARTER_STAGES * HALF_TOKENS * group_shapes.TOKEN_BYTES // QUARTERS
    unit = SHAPE.rows // UNIT_ROWS * unit_bytes(dtype) + HALF_TOKENS * (group_shapes.SUM_BYTES + 4)
    barriers = (2 * (QUARTER_STAGES + SHAPE.stages) + SHAPE.groups) * group_shapes.BARRIER_BYTES
    return quarters + SHAPE.stages * unit + 4 * SHAPE.rows * HALF_TOKENS + barriers
