"""Plans a graph for one device: lowers its buckets, chooses their launches, and adds up their
memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import accel.cuda
from accel.cuda.device import Device
from accel.cuda.driver import TIER
from accel.cuda.persistent import compose
from accel.cuda.plan import Plan, plan_launches, sent_since
from accel.cuda.registered import cuda_buckets
from accel.cuda.step_choice import NEVER, StepChoice
from accel.cuda.unpacked_pages import unpack_rotated, with_own_pages
from accel.packets import shares
from accel.packets.binding import product_factors
from accel.packets.estimate_cache import EstimateCache, code_state, decoded_memory, encoded_memory
from accel.packets.footprint import StepMemory, device_footprint, step_memory
from accel.packets.head_shares import Pages, has_own_heads, pages_of_heads, stretches_of
from accel.packets.packet import aligned
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.schedule import schedule_launches
from accel.packets.step import Schedule, Step
from contract.dtypes import StorageClass
from contract.footprint import Footprint
from contract.ir.inputs import input_layout
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.unread_outputs import kinds_of_steps
from contract.shape_key import ShapeKey


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory of all buckets of a graph.

    ``workspace_bytes`` are the workspaces of all buckets whose contents last from step to step;
    ``transient_bytes`` are the largest workspaces of one bucket whose contents do not. ``factors``
    are the buffers that some product reads, which are arranged when they are uploaded. ``divided``
    are the matrices of which each device has a share of the rows, and the pages of which it has
    its own KV heads."""

    steps: StepMemory
    workspace_bytes: int
    transient_bytes: int
    factors: frozenset[str]
    divided: frozenset[str]


def cached_estimate(
    folder: Path | None,
    parameters: tuple[object, ...],
    graph: Graph,
    largest: ShapeKey,
    make: Callable[[], MemoryEstimate],
) -> MemoryEstimate:
    """The cached estimate for ``graph``, else that of ``make``. The ``repr`` of ``parameters``
    identifies all inputs of planning other than the graph."""
    code = code_state((accel.cuda,))
    if folder is None or code is None:
        return make()
    cache = EstimateCache(folder, (TIER, repr(parameters), code), _encoded, _decoded)
    return cache.of(graph, largest, make)


def _encoded(needs: MemoryEstimate) -> list[Any]:
    factors, divided = sorted(needs.factors), sorted(needs.divided)
    own = [needs.workspace_bytes, needs.transient_bytes]
    return [encoded_memory(needs.steps), *own, factors, divided]


def _decoded(data: Any) -> MemoryEstimate:
    steps, own, transient, factors, divided = data
    return MemoryEstimate(
        decoded_memory(steps), own, transient, frozenset(factors), frozenset(divided)
    )


ALONE = shares.Share(0, 1)
NOTHING: Mapping[str, BufferDecl] = {}


@dataclass(frozen=True, slots=True)
class LoweredBucket:
    """The step of one shape bucket. ``first_rows`` as in ``accel.packets.shares``."""

    step: Step
    schedule: Schedule
    plan: Plan
    first_rows: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """The memory of a graph, and the ``buckets`` lowered so far, which are reused when it is
    bound. ``choice`` says which launches are joined."""

    graph: Graph
    largest: ShapeKey
    choice: StepChoice
    footprint: Footprint
    needs: MemoryEstimate
    buckets: dict[ShapeKey, LoweredBucket]

    @property
    def key(self) -> tuple[Graph, ShapeKey, StepChoice]:
        """Inputs that determine the plan."""
        return self.graph, self.largest, self.choice


@dataclass(slots=True)
class Planner:
    """Plans graphs for one ``device``, which executes its ``share`` of them.

    ``arranged_bytes`` returns the bytes of a weight in the layout of products; ``planned`` is the
    last planned graph. ``streams`` says of which graphs weights are streamed: their copies are
    between launches, so none are joined. Estimates are cached in the folder ``cache``, so that no
    bucket is lowered too early."""

    device: Device
    step: StepChoice
    share: shares.Share
    arranged_bytes: Callable[[BufferDecl], int]
    cache: Path | None = None
    streams: Callable[[Graph], bool] = lambda _: False
    planned: PlannedGraph | None = field(default=None)

    def plan(self, graph: Graph, largest: ShapeKey, streams: bool | None = None) -> PlannedGraph:
        """Plan ``graph`` for steps up to ``largest``; ``streams`` as if it were the answer of
        ``self.streams``. Raises UnsupportedOp."""
        streams = self.streams(graph) if streams is None else streams
        choice = NEVER if streams else self.step
        planned = self.planned
        if planned is None or planned.key != (graph, largest, choice):
            planned = self.planned = self._looked_at(graph, largest, choice)
        return planned

    def lowered(
        self, graph: Graph, bucket: ShapeKey, divided: Mapping[str, BufferDecl]
    ) -> LoweredBucket:
        """The bucket as planned, if it was planned with the same buffers ``divided``, of which the
        whole declarations are given."""
        planned, choice = self.planned, NEVER if self.streams(graph) else self.step
        same = planned is not None and (planned.graph, planned.choice) == (graph, choice)
        if planned is not None and same and planned.needs.divided == divided.keys():
            known = planned.buckets.get(bucket)
            if known is not None:
                return known
        return planned_bucket(_lowered(graph, bucket), self.device, choice, self.share, divided)

    def _looked_at(self, graph: Graph, largest: ShapeKey, choice: StepChoice) -> PlannedGraph:
        buckets: dict[ShapeKey, LoweredBucket] = {}

        def look() -> MemoryEstimate:
            steps = {bucket: _lowered(graph, bucket) for bucket in cuda_buckets(largest)}
            divided = divided_buffers(graph, steps.values(), self.share)
            buckets.update(
                (bucket, planned_bucket(step, self.device, choice, self.share, divided))
                for bucket, step in steps.items()
            )
            return _estimate_of(buckets, largest, frozenset(divided))

        parameters = self.device, choice, self.share
        needs = cached_estimate(self.cache, parameters, graph, largest, look)

        def arranged(decl: BufferDecl) -> int:
            return self.arranged_bytes(decl) if decl.name in needs.factors else 0

        held = {
            name: share_of_decl(decl, self.share) if name in needs.divided else decl
            for name, decl in graph.buffers.items()
        }
        own = replace(graph, buffers=held)
        # There is one more input buffer than the footprint of the graph's buffers counts.
        extra = needs.workspace_bytes * kinds_of_steps(graph)
        extra += aligned(input_layout(graph, largest).nbytes)
        extra += aligned(needs.transient_bytes) if needs.transient_bytes else 0
        # Packets are arguments of launches and take no device memory.
        steps = replace(needs.steps, packets=())
        footprint = device_footprint(own, largest, steps, arranged, extra)
        return PlannedGraph(graph, largest, choice, footprint, needs, buckets)


def divided_buffers(
    graph: Graph, steps: Collection[Step], share: shares.Share
) -> dict[str, BufferDecl]:
    """The buffers of which a device has a part in all ``steps``: weights with its share of the
    rows, and pages with its own heads."""
    if share.count == 1:
        return {}
    kept = sorted(set().union(*(_pages_of(step) for step in steps)) & graph.buffers.keys())
    pages = {n: d for n in kept if has_own_heads(d := graph.buffers[n], share.count)}
    weights = {d.name: d for d in graph.of_kind(BufferKind.WEIGHT) if _can_be_shared(d)}
    rows = shares.divided_weights(list(steps), share, page_stretches(pages))
    return {**pages, **{name: weights[name] for name in sorted(rows & weights.keys())}}


def page_stretches(divided: Mapping[str, BufferDecl]) -> Pages:
    """The pages among ``divided`` buffers."""
    return {n: stretches_of(d) for n, d in divided.items() if d.kind is BufferKind.STATE}


def _pages_of(step: Step) -> set[str]:
    """The buffers whose keys and values the step writes or reads."""
    kept = (op.operand("kv") for op in step.ops if "kv" in op.device.index_of)
    return {tensor.buffer for tensor in kept if tensor is not None}


def planned_bucket(
    step: Step,
    device: Device,
    choice: StepChoice = NEVER,
    share: shares.Share = ALONE,
    divided: Mapping[str, BufferDecl] = NOTHING,
) -> LoweredBucket:
    """The part of a lowered step that ``device`` executes, with its share of the ``divided``
    buffers."""
    shared = shares.SharedStep(step, shares.NO_ROWS)
    if share.count > 1:
        pages = page_stretches(divided)
        shared = shares.share_step(step, share, divided.keys(), pages)
    step = with_own_pages(shared.step, step)
    tuned = plan_launches(step.ops, device, step.scratch)
    plan = compose(tuned, step.ops, device, choice, step.scratch, share.count)
    if share.count > 1 and plan is tuned:
        plan = plan_launches(step.ops, device, step.scratch, sends=True)
    since = {name: plan.levels[op] for name, op in shares.written_since(step.ops).items()}
    since = sent_since(plan, step.ops) | since
    schedule = schedule_launches(step, plan.levels, plan.joined_levels, since)
    return LoweredBucket(step, schedule, plan, shared.first_rows)


def _estimate_of(
    buckets: Mapping[ShapeKey, LoweredBucket], largest: ShapeKey, divided: frozenset[str]
) -> MemoryEstimate:
    def lower(bucket: ShapeKey) -> tuple[Step, Schedule]:
        return buckets[bucket].step, buckets[bucket].schedule

    return MemoryEstimate(
        steps=step_memory(lower, largest, cuda_buckets),
        workspace_bytes=sum(one.plan.memory_bytes for one in buckets.values()),
        transient_bytes=max((one.plan.transient_bytes for one in buckets.values()), default=0),
        factors=frozenset().union(*(product_factors(one.step) for one in buckets.values())),
        divided=divided,
    )


def share_of_decl(decl: BufferDecl, share: shares.Share) -> BufferDecl:
    """The declaration of a matrix, or stack of matrices, with only the device's own rows, or of
    pages with its own KV heads."""
    if decl.kind is BufferKind.STATE:
        return pages_of_heads(decl, share.count)
    *matrices, rows, columns = decl.shape
    return replace(decl, shape=(*matrices, len(share.of(int(rows))), columns))


def _can_be_shared(decl: BufferDecl) -> bool:
    """Whether rows can be divided; float stacks are uploaded whole, as they lie in the file."""
    return len(decl.shape) == 2 or decl.dtype.storage is not StorageClass.FLOAT


def _lowered(graph: Graph, bucket: ShapeKey) -> Step:
    return unpack_rotated(lower_graph(graph, bucket, ROW_PARTS, TIER), graph, bucket)
