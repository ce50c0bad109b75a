"""Decides where workers wait at barriers, what each worker computes by itself, and where scratch
memory lies.

Ops stay in the order of the graph. An op needs a barrier if a worker would access an element that
another worker accessed since the last barrier. Two things save barriers: an elementwise op divides
columns as the product before it does, and every worker computes a cheap op by itself."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from accel.packets.device_op import Split
from accel.packets.packet import aligned
from accel.packets.step import Op, Placement, Schedule, Step, Touch

MAX_REPEATING_WORKERS = 64
"""Most workers that repeat cheap work to save a barrier. The thousands of workers of an accelerator
would saturate its memory; there every op is divided among work-groups, with its own split."""

NOTHING: Mapping[str, int] = MappingProxyType({})
Lifetimes = dict[str, tuple[int, int]]
Pending = dict[str, list[Touch]]
"""The accesses to each buffer since the last barrier."""


def schedule_workers(step: Step, workers: int) -> Schedule:
    """The schedule of one kernel whose ``workers`` wait for each other at barriers."""
    writers = Counter(name for op in step.ops for name in op.results())
    placements: list[Placement] = []
    own: set[str] = set()
    pending: Pending = {}
    level = 0
    shared = workers > MAX_REPEATING_WORKERS
    for op in step.ops:
        if shared:
            op = replace(op, splits=(Split.ANY,) * len(op.splits))
        columns = not shared and op.by_columns and _follows_columns(op, pending)
        everyone = not shared and workers > 1 and op.private and not columns
        if everyone:
            own |= {name for name in op.results() if name in step.scratch and writers[name] == 1}
        touches = [
            touch for touch in op.touches(columns, everyone) if touch.tensor.buffer not in own
        ]
        wait = not _safe(touches, pending)
        if wait:
            pending = {}
            level += 1
        for touch in touches:
            pending.setdefault(touch.tensor.buffer, []).append(touch)
        placements.append(Placement(wait, everyone, columns, level))
    return _placed(step, placements, own)


def schedule_launches(
    step: Step,
    levels: Sequence[int] | None = None,
    together: Sequence[tuple[int, int]] = (),
    since: Mapping[str, int] = NOTHING,
) -> Schedule:
    """The schedule of consecutive launches. Each op has its own level, or ``levels`` gives the
    level of each op; ops of one level share a launch and no memory.

    ``together`` has first and last levels of launches that run concurrently in data order: buffers
    used both inside and outside such a range share no memory with anything inside. ``since`` names
    buffers that another device may write from a level on."""
    levels = range(len(step.ops)) if levels is None else levels
    placements = [Placement(False, False, False, level) for level in levels]
    return _placed(step, placements, set(), together, since)


def schedule_levels(step: Step) -> Schedule:
    """The schedule of consecutive launches on one queue; launches without a barrier between them
    may overlap."""
    return schedule_workers(step, MAX_REPEATING_WORKERS + 1)


def _safe(touches: Sequence[Touch], pending: Pending) -> bool:
    """Whether no worker accesses an element that another worker accessed since the last barrier."""
    for touch in touches:
        for earlier in pending.get(touch.tensor.buffer, ()):
            if not touch.safe_after(earlier):
                return False
    return True


def _follows_columns(op: Op, pending: Pending) -> bool:
    """Whether ``op`` needs no barrier if it divides columns as the op before it did."""
    touches = op.touches(columns=True)
    follows = any(
        earlier.writes and earlier.split is Split.COLUMNS and touch.tensor.overlaps(earlier.tensor)
        for touch in touches
        for earlier in pending.get(touch.tensor.buffer, ())
    )
    return follows and _safe(touches, pending)


def _placed(
    step: Step,
    placements: Sequence[Placement],
    own: set[str],
    together: Sequence[tuple[int, int]] = (),
    since: Mapping[str, int] = NOTHING,
) -> Schedule:
    shared_lives: Lifetimes = {}
    own_lives: Lifetimes = {}
    for index, (op, placement) in enumerate(zip(step.ops, placements, strict=True)):
        for tensor in op.operands:
            if tensor is None or tensor.buffer not in step.scratch:
                continue
            # A worker accesses its own memory in op order; shared memory may be reused only after
            # the next barrier.
            lives, now = (
                (own_lives, index) if tensor.buffer in own else (shared_lives, placement.level)
            )
            first, _ = lives.get(tensor.buffer, (min(now, since.get(tensor.buffer, now)), now))
            lives[tensor.buffer] = (first, now)
    shared_lives = {name: _stretched(life, together) for name, life in shared_lives.items()}
    shared, shared_bytes = _pack(shared_lives, step.scratch)
    own_offsets, own_bytes = _pack(own_lives, step.scratch)
    return Schedule(tuple(placements), shared, shared_bytes, own_offsets, own_bytes)


def _stretched(life: tuple[int, int], together: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The lifetime, extended over every range of levels that it overlaps without lying inside."""
    first, last = life
    for begin, end in together:
        if first <= end and last >= begin and not (begin <= first and last <= end):
            first, last = min(first, begin), max(last, end)
    return first, last


def _pack(lives: Lifetimes, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """First fit in order of first use: the offset of each buffer, and the bytes in all."""
    offsets: dict[str, int] = {}
    alive: list[tuple[int, int, int]] = []
    total = 0
    for name, (first, last) in sorted(lives.items(), key=lambda item: (item[1], item[0])):
        size = aligned(max(sizes[name], 1))
        alive = [block for block in alive if block[2] >= first]
        offset = 0
        for start, stop, _ in alive:
            if offset + size <= start:
                break
            offset = max(offset, stop)
        offsets[name] = offset
        total = max(total, offset + size)
        insort(alive, (offset, offset + size, last))
    return offsets, total
