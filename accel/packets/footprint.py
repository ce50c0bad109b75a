"""Estimates the device memory a graph needs on a tier of packets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from accel.packets.binding import stored_operands
from accel.packets.layouts import lanes_bytes, planes_bytes
from accel.packets.packet import PACKET, aligned
from accel.packets.shape_buckets import shape_buckets
from accel.packets.step import Op, Schedule, Step
from contract.footprint import Footprint, owns_upload
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.ir.unread_outputs import kinds_of_steps
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey

Lower = Callable[[ShapeKey], tuple[Step, Schedule]]
"""Lowers a graph for one shape bucket: its step and schedule."""
Buckets = Callable[[ShapeKey], Sequence[ShapeKey]]
"""Returns the shape buckets for steps up to the largest."""

StoreStep = Callable[[Graph, ShapeKey, ShapeKey, tuple[Step, Schedule]], bool]
"""Stores the step of a graph with steps up to the first size for a shape bucket, the second, if it
can; returns whether it did."""

MAPPED_OUTPUT_BYTES = 1 << 16
"""Smaller outputs are copied to the host after every step, larger ones when requested."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory that the steps of all shape buckets of a graph need, in bytes.

    ``shared`` is the scratch shared by all workers, ``own`` the scratch of each worker, both the
    largest of any bucket. ``packets`` has the bytes of each bucket's packets. ``stored`` are the
    buffers that ops read in the declared layout. ``kinds`` are pairs of an op's name and the format
    of its weights, "" for an op without weights."""

    shared: int
    own: int
    packets: tuple[int, ...]
    stored: frozenset[str]
    kinds: frozenset[tuple[str, str]]


MemoryCache = Callable[[Graph, ShapeKey, Callable[[], StepMemory]], StepMemory]
"""Returns the memory for steps of a graph up to the largest, from a cache or by calling its last
argument."""


def step_memory(lower: Lower, largest: ShapeKey, buckets: Buckets = shape_buckets) -> StepMemory:
    """The memory for steps up to ``largest``, found by lowering every shape bucket. A step is not
    kept beside the next one, since the objects of each take a megabyte."""
    shared = own = 0
    packets: list[int] = []
    stored: frozenset[str] = frozenset()
    kinds: frozenset[tuple[str, str]] = frozenset()
    for bucket in buckets(largest):
        step, schedule = lower(bucket)
        shared, own = max(shared, schedule.shared_bytes), max(own, schedule.own_bytes)
        packets.append(len(step.ops) * PACKET.itemsize)
        stored |= stored_operands(step)
        kinds |= op_kinds(step.ops)
        del step, schedule
    return StepMemory(shared, own, tuple(packets), stored, kinds)


def op_kinds(ops: Iterable[Op]) -> frozenset[tuple[str, str]]:
    """The pairs of name and weight format, as in ``StepMemory``."""
    return frozenset((op.name, "" if op.dtype is None else op.dtype.name) for op in ops)


class PlannedSteps:
    """Lowers the steps of a graph once, both to compute their memory and to run them.

    The steps of the latest graph whose memory was computed stay here until ``of`` takes them,
    except those that ``store`` has stored. ``schedule`` lowers a graph for one shape bucket. If
    ``cache`` has the memory, nothing is lowered for it."""

    def __init__(
        self,
        schedule: Callable[[Graph, ShapeKey], tuple[Step, Schedule]],
        buckets: Buckets = shape_buckets,
        cache: MemoryCache | None = None,
        store: StoreStep | None = None,
    ) -> None:
        self._schedule = schedule
        self._store = store
        self._buckets = buckets
        self._cache = cache
        self._planned: tuple[Graph, ShapeKey] | None = None
        self._steps: dict[ShapeKey, tuple[Step, Schedule]] = {}
        self._memory: StepMemory | None = None

    def memory(self, graph: Graph, largest: ShapeKey) -> StepMemory:
        """The memory for steps of ``graph`` up to ``largest``."""
        if self._memory is None or self._planned != (graph, largest):
            self._planned, self._steps, self._memory = (graph, largest), {}, None

            def make() -> StepMemory:
                def lower(bucket: ShapeKey) -> tuple[Step, Schedule]:
                    lowered = self._schedule(graph, bucket)
                    if not (self._store and self._store(graph, largest, bucket, lowered)):
                        self._steps[bucket] = lowered
                    return lowered

                return step_memory(lower, largest, self._buckets)

            self._memory = self._cache(graph, largest, make) if self._cache else make()
        return self._memory

    def of(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        """The step of ``graph`` for a shape bucket, which is no longer stored here."""
        planned = None
        if self._planned is not None and self._planned[0] is graph:
            planned = self._steps.pop(bucket, None)
        return planned or self._schedule(graph, bucket)


def worker_footprint(
    graph: Graph,
    largest: ShapeKey,
    steps: StepMemory,
    workers: int,
    shared: bool,
    arranged: Callable[[BufferDecl], int] | None = None,
    extra: int = 0,
) -> Footprint:
    """The bytes of a tier with ``workers`` workers that have scratch of their own.

    If ``shared``, the device reads host memory, and nothing is aligned or staged. ``arranged``
    returns the bytes of a buffer in the layout of products, 0 if it stays as stored; by default
    matrices are in groups of 16 rows. Lowered buckets need ``extra`` more bytes."""
    arranged = arranged or lanes_bytes
    buffers: dict[str, int] = {}
    mapped: dict[str, int] = {}
    staging = 0
    for decl in graph.buffers.values():
        if decl.kind is BufferKind.SCRATCH:
            continue
        nbytes = buffer_bytes(decl, largest)
        as_read = arranged(decl)
        read = nbytes if decl.name in steps.stored or not as_read else 0
        if shared:
            in_place = not owns_upload(decl)
            buffers[decl.name] = as_read + (0 if in_place else nbytes)
            if in_place and read:
                mapped[decl.name] = read
        else:
            buffers[decl.name] = sum(aligned(part) for part in (as_read, read) if part)
            staging += nbytes if _has_host_copy(decl, nbytes) else 0
    scratch = steps.shared + steps.own * workers
    variants = sum(steps.packets)
    if not shared:
        scratch = aligned(steps.shared) + aligned(steps.own * workers)
        variants = sum(map(aligned, steps.packets))
    variants = variants * kinds_of_steps(graph) + extra
    return Footprint(buffers, mapped, scratch, variants, staging=staging)


def device_footprint(
    graph: Graph,
    largest: ShapeKey,
    steps: StepMemory,
    arranged: Callable[[BufferDecl], int] | None = None,
    extra: int = 0,
) -> Footprint:
    """The bytes of a tier that copies every buffer to the device and has no scratch per worker;
    ``arranged`` and ``extra`` as in ``worker_footprint``."""
    return worker_footprint(graph, largest, steps, 0, False, arranged, extra)


def shared_footprint(
    graph: Graph, largest: ShapeKey, steps: StepMemory, view_bytes: int
) -> Footprint:
    """The bytes of a tier whose device uses host memory: matrices in planes, and copies of all else
    but views of the model file of at least ``view_bytes``."""
    copied = device_footprint(graph, largest, steps, planes_bytes)
    buffers, mapped = dict(copied.buffers), {}
    for decl in graph.of_kind(BufferKind.WEIGHT):
        nbytes, arranged = buffer_bytes(decl, largest), planes_bytes(decl)
        if nbytes >= view_bytes and not owns_upload(decl):
            buffers[decl.name] = aligned(arranged) if arranged else 0
            if decl.name in steps.stored or not arranged:
                mapped[decl.name] = nbytes
    return replace(copied, buffers=buffers, mapped=mapped, staging=0)


def _has_host_copy(decl: BufferDecl, nbytes: int) -> bool:
    """Whether a device with its own memory has a copy of the buffer in host memory."""
    if decl.kind is BufferKind.OUTPUT:
        return nbytes < MAPPED_OUTPUT_BYTES
    if decl.kind in (BufferKind.WEIGHT, BufferKind.CONSTANT):
        return owns_upload(decl)
    return decl.kind is BufferKind.REQUEST
