"""How much a launch has to do, and cutting a long step so that no watchdog ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from accel.packets.step import PRODUCTS, Op
from contract.arithmetic import PAGE_TOKENS

BATCH_WORK = 1 << 34
"""Multiplications a device gets at a time, so that no watchdog of a slow one barks: some 0.3 s at
100 billion operations a second."""


def work_of(op: Op) -> int:
    """About how many multiplications an op takes at most."""
    sizes = op.most_sizes()
    if op.name in PRODUCTS or op.name == "matmul_planes":
        return sizes.get("tokens", 1) * sizes["rows"] * sizes["columns"]
    elements = max(t.columns for t in op.operands if t is not None)
    if "kv_heads" in sizes:
        names = [operand.name for operand in op.device.operands]
        table = op.operands[names.index("page_table")]
        assert table is not None
        return 2 * op.count.most * sizes["heads"] * sizes["head_dim"] * table.columns * PAGE_TOKENS
    return op.count.most * elements


def cut(work: Sequence[int], most: int, waits: Sequence[bool] = ()) -> list[range]:
    """Runs of consecutive launches of at most ``most`` work, or of a single launch. Given which of
    them wait for those before, launches side by side stay together where they are no more."""
    starts, total = [0], 0
    for run in _levels(work, most, waits):
        amount = sum(work[run.start : run.stop])
        if total and total + amount > most:
            starts.append(run.start)
            total = 0
        total += amount
    return [range(*pair) for pair in pairwise([*starts, len(work)])]


def _levels(work: Sequence[int], most: int, waits: Sequence[bool]) -> Iterator[range]:
    """Launches side by side, or each for itself where together they are more than ``most``."""
    starts = [index for index in range(len(work)) if not waits or waits[index] or not index]
    for start, stop in pairwise([*starts, len(work)]):
        if sum(work[start:stop]) <= most:
            yield range(start, stop)
        else:
            yield from (range(index, index + 1) for index in range(start, stop))
