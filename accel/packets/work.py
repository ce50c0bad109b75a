"""Estimates the work of launches, and divides a long step into batches that are too short for a
watchdog to kill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from accel.packets.step import PRODUCTS, Op
from contract.arithmetic import PAGE_TOKENS

BATCH_WORK = 1 << 34
"""Most multiplications of one batch: about 0.3 s at 100 billion a second, short enough for the
watchdog of a slow device."""


def work_of(op: Op) -> int:
    """An approximate upper bound of the number of multiplications of an op."""
    sizes = op.max_sizes()
    if op.name in PRODUCTS or op.name == "matmul_planes":
        return sizes.get("tokens", 1) * sizes["rows"] * sizes["columns"]
    elements = max(t.columns for t in op.operands if t is not None)
    if "kv_heads" in sizes:
        table = op.operand("page_table")
        assert table is not None
        return (
            2 * op.count.maximum * sizes["heads"] * sizes["head_dim"] * table.columns * PAGE_TOKENS
        )
    return op.count.maximum * elements


def split_launches(work: Sequence[int], limit: int, waits: Sequence[bool] = ()) -> list[range]:
    """Runs of consecutive launches of at most ``limit`` work, or of a single launch.

    ``waits`` says which launches wait for those before; overlapping launches stay in one run if
    they fit."""
    starts, total = [0], 0
    for run in _levels(work, limit, waits):
        amount = sum(work[run.start : run.stop])
        if total and total + amount > limit:
            starts.append(run.start)
            total = 0
        total += amount
    return [range(*pair) for pair in pairwise([*starts, len(work)])]


def _levels(work: Sequence[int], limit: int, waits: Sequence[bool]) -> Iterator[range]:
    """Runs of overlapping launches, or single launches where a run has more than ``limit`` work."""
    starts = [index for index in range(len(work)) if not waits or waits[index] or not index]
    for start, stop in pairwise([*starts, len(work)]):
        if sum(work[start:stop]) <= limit:
            yield range(start, stop)
        else:
            yield from (range(index, index + 1) for index in range(start, stop))
