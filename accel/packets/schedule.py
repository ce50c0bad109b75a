"""Decides where workers wait at barriers, what each worker computes by itself, and where scratch
memory lies.

Ops stay in the order of the graph. An op needs a barrier if a worker would access an element that
another worker accessed since the last barrier. Two things save barriers: an elementwise op divides
columns as the product before it does, and every worker computes a cheap op by itself. Such an
elementwise op also writes over an operand that nothing reads afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accel.packets.device_op import Split
from accel.packets.packet import aligned
from accel.packets.step import Op, OpSchedule, Schedule, Step, Touch

MAX_REPEATING_WORKERS = 64
"""Most workers that repeat cheap work to save a barrier. The thousands of workers of an accelerator
would saturate its memory; there every op is divided among work-groups, with its own split."""

NOTHING: Mapping[str, int] = {}
NO_NAMES: Mapping[str, str] = {}
Lifetimes = dict[str, tuple[int, int]]
Pending = dict[str, list[Touch]]
"""The accesses to each buffer since the last barrier."""


def schedule_workers(step: Step, workers: int) -> Schedule:
    """The schedule of one kernel whose ``workers`` wait for each other at barriers."""
    writers = Counter(name for op in step.ops for name in op.results())
    last_uses = {t.buffer: index for index, op in enumerate(step.ops) for t in op.operands if t}
    overwritten: dict[str, str] = {}
    op_schedules: list[OpSchedule] = []
    own: set[str] = set()
    pending: Pending = {}
    level = 0
    shared = workers > MAX_REPEATING_WORKERS
    for index, op in enumerate(step.ops):
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
        if not shared and not everyone and op.by_columns:
            source, result = touches[0], touches[-1]
            ends = last_uses[source.tensor.buffer] == index and writers[result.tensor.buffer] == 1
            if ends and _may_replace(source, result, step.scratch, own, pending):
                overwritten[result.tensor.buffer] = source.tensor.buffer
        for touch in touches:
            pending.setdefault(touch.tensor.buffer, []).append(touch)
        op_schedules.append(OpSchedule(wait, everyone, columns, level))
    return _with_scratch(step, op_schedules, own, largest_first=not shared, overwritten=overwritten)


def schedule_launches(
    step: Step,
    levels: Sequence[int] | None = None,
    concurrent: Sequence[tuple[int, int]] = (),
    shared_from: Mapping[str, int] = NOTHING,
) -> Schedule:
    """The schedule of consecutive launches. Each op has its own level, or ``levels`` gives the
    level of each op; ops of one level share a launch and no memory.

    ``concurrent`` has first and last levels of launches that run at the same time, in data order:
    buffers used both inside and outside such a range share no memory with anything inside.
    ``shared_from`` names buffers that another device may write from a level on."""
    levels = range(len(step.ops)) if levels is None else levels
    op_schedules = [OpSchedule(False, False, False, level) for level in levels]
    return _with_scratch(step, op_schedules, set(), concurrent, shared_from)


def schedule_levels(step: Step) -> Schedule:
    """The schedule of launches in order on one queue; without a barrier they may overlap."""
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


def _may_replace(
    source: Touch, result: Touch, sizes: Mapping[str, int], own: set[str], pending: Pending
) -> bool:
    """Whether an elementwise op may write its result over an operand.

    Both must be whole shared buffers of this step and divided alike, and no other worker may still
    access the operand."""
    read, written = source.tensor, result.tensor
    alike = written._replace(buffer=read.buffer) == read and source.split is result.split
    ours = read.buffer in sizes and written.buffer in sizes
    if not alike or not ours or {read.buffer, written.buffer} & own:
        return False
    whole = read.columns == read.stride and sizes[read.buffer] == sizes[written.buffer]
    return whole and _safe([source._replace(writes=True)], pending)


def _with_scratch(
    step: Step,
    op_schedules: Sequence[OpSchedule],
    own: set[str],
    concurrent: Sequence[tuple[int, int]] = (),
    shared_from: Mapping[str, int] = NOTHING,
    largest_first: bool = False,
    overwritten: Mapping[str, str] = NO_NAMES,
) -> Schedule:
    """The schedule with an offset for every step-local buffer.

    ``overwritten`` names, for a buffer, an earlier one in whose memory it lies. Both are one
    lifetime here. For the other arguments see ``schedule_launches``."""
    first_names: dict[str, str] = {}
    shared_lives: Lifetimes = {}
    own_lives: Lifetimes = {}
    for index, (op, op_schedule) in enumerate(zip(step.ops, op_schedules, strict=True)):
        for tensor in op.operands:
            if tensor is None or tensor.buffer not in step.scratch:
                continue
            # A worker accesses its own memory in op order; shared memory may be reused only after
            # the next barrier.
            lives, now = (
                (own_lives, index) if tensor.buffer in own else (shared_lives, op_schedule.level)
            )
            name = tensor.buffer
            if name in overwritten:
                earlier = overwritten[name]
                name = first_names.setdefault(name, first_names.get(earlier, earlier))
            first, _ = lives.get(name, (min(now, shared_from.get(name, now)), now))
            lives[name] = (first, now)
    shared_lives = {name: _extended(life, concurrent) for name, life in shared_lives.items()}
    shared, shared_bytes = _pack(shared_lives, step.scratch, largest_first)
    own_offsets, own_bytes = _pack(own_lives, step.scratch, largest_first)
    shared |= {name: shared[first] for name, first in first_names.items()}
    return Schedule(tuple(op_schedules), shared, shared_bytes, own_offsets, own_bytes)


def _extended(life: tuple[int, int], concurrent: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The lifetime, extended over every range of levels that it overlaps without lying inside."""
    first, last = life
    for begin, end in concurrent:
        if first <= end and last >= begin and not (begin <= first and last <= end):
            first, last = min(first, begin), max(last, end)
    return first, last


def _pack(
    lives: Lifetimes, sizes: Mapping[str, int], largest_first: bool
) -> tuple[dict[str, int], int]:
    """First fit, the largest buffers first or in order of first use: the offset of each buffer, and
    the bytes in all.

    The largest first needs the least memory: buffers that come and go leave gaps into which a
    larger one would not fit."""
    offsets: dict[str, int] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    total = 0

    def order(name: str) -> tuple[int, tuple[int, int], str]:
        return -sizes[name] if largest_first else 0, lives[name], name

    for name in sorted(lives, key=order):
        first, last = lives[name]
        size = aligned(max(sizes[name], 1))
        levels = range(first, last + 1)
        offset = 0
        for start, stop in sorted({block for level in levels for block in taken.get(level, ())}):
            if offset + size <= start:
                break
            offset = max(offset, stop)
        offsets[name] = offset
        total = max(total, offset + size)
        for level in levels:
            taken.setdefault(level, []).append((offset, offset + size))
    return offsets, total
