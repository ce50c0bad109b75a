"""What a graph takes on the OpenCL tier: arranged weights, copies where memory is not shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accel.packets.binding import stored_operands
from accel.packets.layouts import repacked_bytes
from accel.packets.packet import PACKET, aligned
from accel.packets.rules_attention import SPLIT_TOKENS
from accel.packets.step import Schedule, Step
from contract.footprint import Footprint, owns_upload
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey

Lower = Callable[[ShapeKey], tuple[Step, Schedule]]
"""The step of a graph for one ShapeKey, and its schedule."""

FEW = 12
"""Tokens of a step whose rows of usual widths are still cheap enough to be computed repeatedly."""
EXCHANGED = (BufferKind.REQUEST, BufferKind.OUTPUT)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The most that steps up to some size take: bytes of scratch ``shared`` by all workers, each
    worker's ``own``, and the ``packets`` of one step. ``stored`` are the buffers that ops read as
    the graph declares them."""

    shared: int
    own: int
    packets: int
    stored: frozenset[str]


def step_memory(lower: Lower, largest: ShapeKey) -> StepMemory:
    """Looks at the steps whose form differs: few tokens split attention, and work that is cheap
    enough is repeated by every worker."""
    lowered = [lower(key) for key in _telling_keys(largest)]
    return StepMemory(
        shared=max(schedule.shared_bytes for _, schedule in lowered),
        own=max(schedule.own_bytes for _, schedule in lowered),
        packets=max(len(step.ops) for step, _ in lowered) * PACKET.itemsize,
        stored=frozenset().union(*(stored_operands(step) for step, _ in lowered)),
    )


def _telling_keys(largest: ShapeKey) -> Iterator[ShapeKey]:
    """The largest step, the largest that splits attention, and one of much repeated work."""
    for count in sorted({min(n, largest.tokens) for n in (SPLIT_TOKENS, FEW, largest.tokens)}):
        yield ShapeKey(count, min(count, largest.rows))


def opencl_footprint(
    graph: Graph, largest: ShapeKey, steps: StepMemory, workers: int, shared: bool
) -> Footprint:
    """The bytes the tier allocates; ``shared`` where the device reads host memory."""
    buffers: dict[str, int] = {}
    mapped: dict[str, int] = {}
    mirrors = 0
    for decl in graph.buffers.values():
        if decl.kind is BufferKind.SCRATCH:
            continue
        nbytes = buffer_bytes(decl, largest)
        arranged = _arranged_bytes(decl)
        read = nbytes if decl.name in steps.stored or not arranged else 0
        if shared:
            in_place = not owns_upload(decl)
            buffers[decl.name] = arranged + (0 if in_place else nbytes)
            if in_place and read:
                mapped[decl.name] = read
        else:
            buffers[decl.name] = sum(aligned(part) for part in (arranged, read) if part)
            kept = decl.kind in EXCHANGED or (_uploaded(decl) and owns_upload(decl))
            mirrors += nbytes if kept else 0
    scratch = steps.shared + steps.own * workers
    variant = steps.packets
    if not shared:
        scratch = aligned(steps.shared) + aligned(steps.own * workers)
        variant = aligned(variant)
    return Footprint(buffers, mapped, scratch, variant, mirrors=mirrors)


def _uploaded(decl: BufferDecl) -> bool:
    return decl.kind in (BufferKind.WEIGHT, BufferKind.CONSTANT)


def _arranged_bytes(decl: BufferDecl) -> int:
    if decl.kind is not BufferKind.WEIGHT or len(decl.shape) not in (2, 3):
        return 0
    *matrices, rows, columns = (int(dim) for dim in decl.shape)
    return math.prod(matrices) * repacked_bytes(decl.dtype, rows, columns)
