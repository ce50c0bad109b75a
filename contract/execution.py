"""Execution objects over a Tier: recorded graphs, streams, events and plans. Mechanism only.

A Buffer is the only state and graphs are wired by binding the same one. An ExecutableGraph holds
one lowered batch per form of a step; when to replay it is the caller's. A Plan is a DAG of replays
with data dependencies and nothing else.

A tier executes submissions in the order it gets them, so a stream is an ordered queue in front of
it: an operation is submitted as soon as everything before it in its stream has been, and a wait
for an event holds the rest of the stream back until the event was recorded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from contract.errors import ExecutionError
from contract.ir.inputs import InputRows, input_layout, step_of
from contract.ir.nodes import BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.ir.unread_outputs import without_outputs
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, PacketBatch, Tier

STEP_LOCAL = (BufferKind.SCRATCH, BufferKind.REQUEST)
"""Buffers that no host hands over: a step's own memory and its inputs."""


class ExecutableGraph:
    """A graph on a tier: its buffers by port name, and a batch per form of a step.

    Ports are the graph's buffers that outlive a step: neither SCRATCH nor REQUEST. ``largest`` is
    the largest step, ``inputs`` how the bytes of a step's inputs are arranged. A step that wants
    none of the ``optional`` outputs is computed without the nodes that only make those.
    """

    def __init__(
        self,
        tier: Tier,
        graph: Graph,
        buffers: Mapping[str, Buffer],
        largest: ShapeKey,
        optional: Collection[str] = (),
    ) -> None:
        self.tier = tier
        self.graph = graph
        self._optional = frozenset(optional)
        self._shorter = without_outputs(graph, self._optional)
        self.inputs = input_layout(graph, largest)
        self.buckets = tuple(tier.buckets(largest))
        self._largest = largest
        self._batches: dict[tuple[ShapeKey, bool], PacketBatch] = {}
        self._buffers: dict[str, Buffer] = {}
        for port, buffer in buffers.items():
            self.bind(port, buffer)

    @property
    def recorded(self) -> tuple[ShapeKey, ...]:
        """The forms that were lowered."""
        return tuple(dict.fromkeys(bucket for bucket, _ in self._batches))

    def bind(self, port: str, buffer: Buffer) -> None:
        """Use ``buffer`` for ``port``; what was recorded with another one is dropped.

        Raises ExecutionError when the graph has no such port, and when the buffer is too small.
        """
        decl = self.graph.buffers.get(port)
        if decl is None or decl.kind in STEP_LOCAL:
            raise ExecutionError(f"graph {self.graph.name} has no port {port!r}")
        needed = buffer_bytes(decl, self._largest)
        if buffer.nbytes < needed:
            raise ExecutionError(
                f"graph {self.graph.name}: port {port!r} needs {needed:,} bytes for "
                f"{self._largest}, its buffer has {buffer.nbytes:,}"
            )
        if self._buffers.get(port) is not buffer:
            self._batches.clear()
        self._buffers[port] = buffer

    def buffer(self, port: str) -> Buffer:
        """What ``port`` is bound to; ExecutionError when it is not."""
        try:
            return self._buffers[port]
        except KeyError:
            raise ExecutionError(f"graph {self.graph.name}: port {port!r} is not bound") from None

    def bucket_of(self, step: ShapeKey) -> ShapeKey:
        """The smallest form that holds ``step``; ExecutionError when none does."""
        for bucket in self.buckets:
            if step.tokens <= bucket.tokens and step.rows <= bucket.rows:
                return bucket
        raise ExecutionError(
            f"graph {self.graph.name}: a step of {step} is larger than {self._largest}"
        )

    def record(self, bucket: ShapeKey) -> None:
        """Lower the graph for ``bucket`` unless it was: with the nodes that only make optional
        outputs, and without them.

        Raises ExecutionError when a port is unbound, and what ``Tier.lower`` raises.
        """
        self._lowered(bucket, False)
        self._lowered(bucket, True)

    def _lowered(self, bucket: ShapeKey, whole: bool) -> PacketBatch:
        whole = whole or self._shorter is self.graph
        if (bucket, whole) not in self._batches:
            graph = self.graph if whole else self._shorter
            outside = (d.name for d in graph.buffers.values() if d.kind not in STEP_LOCAL)
            buffers = {name: self.buffer(name) for name in outside}
            self._batches[bucket, whole] = self.tier.lower(graph, buffers, bucket, self.inputs)
        return self._batches[bucket, whole]

    def batch(self, inputs: NDArray[np.uint8], requested: Collection[str] = ()) -> PacketBatch:
        """The batch for a step with these inputs, of which the outputs ``requested`` are, lowered if
        it is the first of its kind."""
        whole = not self._optional.isdisjoint(requested)
        return self._lowered(self.bucket_of(step_of(inputs)), whole)

    def replay(
        self,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> Fence:
        """Submit a step; see ``Tier.submit``."""
        fence: Fence = self.tier.submit(self.batch(inputs, requested), inputs, requested, rows)
        return fence

    def replay_on(self, inputs: NDArray[np.uint8], stream: Stream) -> None:
        """As ``replay``, in the order of ``stream``."""
        stream.submit(self.batch(inputs), inputs)


class Stream:
    """Operations in order. Of several streams one event releases, higher ``priority`` goes first.

    Nothing here waits for the device except ``synchronize`` and ``copy_buffer``.
    """

    def __init__(self, tier: Tier, priority: int = 0) -> None:
        self.tier = tier
        self.priority = priority
        self._queue: deque[Callable[[], None]] = deque()
        self._blocker: Event | None = None
        self._fence: Fence | None = None

    @property
    def blocked(self) -> bool:
        """True while the stream waits for an event that was not recorded yet."""
        return self._blocker is not None

    def submit(self, batch: PacketBatch, inputs: NDArray[np.uint8]) -> None:
        """Submit ``batch`` after everything before it in this stream, with ``inputs`` as they are
        now."""
        held = inputs.copy() if self.blocked else inputs

        def start() -> None:
            self._fence = self.tier.submit(batch, held)

        self._enqueue(start)

    def wait(self, event: Event) -> None:
        """Hold everything after this back until ``event`` was recorded."""

        def block() -> None:
            if not event.recorded:
                self._blocker = event
                event.waiting.append(self)

        self._enqueue(block)

    def synchronize(self, timeout: float | None = None) -> None:
        """Return when everything submitted is done.

        Raises ExecutionError when the stream is blocked, since nothing else would unblock it, and
        DeviceLost after ``timeout`` seconds.
        """
        if self.blocked:
            raise ExecutionError("the stream waits for an event that nothing recorded")
        if self._fence is not None:
            self.tier.wait(self._fence, timeout)

    def _enqueue(self, operation: Callable[[], None]) -> None:
        self._queue.append(operation)
        self._advance()

    def _advance(self) -> None:
        while self._queue and not self.blocked:
            self._queue.popleft()()

    def _release(self) -> None:
        self._blocker = None
        self._advance()


class Event:
    """A point in one stream that other streams can wait for. May be recorded again."""

    def __init__(self) -> None:
        self.recorded = False
        self.waiting: list[Stream] = []

    def record(self, stream: Stream) -> None:
        """Mark the point after everything now in ``stream``."""
        self.recorded = False
        stream._enqueue(self._reached)

    def _reached(self) -> None:
        self.recorded = True
        waiting, self.waiting = self.waiting, []
        for stream in sorted(waiting, key=lambda stream: -stream.priority):
            stream._release()


@dataclass(frozen=True, slots=True)
class PlanNode:
    """One replay of a plan."""

    graph: ExecutableGraph
    inputs: NDArray[np.uint8]
    stream: Stream


class Plan:
    """A DAG of replays on streams, ordered by data dependencies only."""

    def __init__(self) -> None:
        self._nodes: list[PlanNode] = []
        self._before: list[set[int]] = []

    def add(self, graph: ExecutableGraph, inputs: NDArray[np.uint8], stream: Stream) -> int:
        """Append a replay with what ``inputs`` hold when it is executed; returns its number."""
        self._nodes.append(PlanNode(graph, inputs, stream))
        self._before.append(set())
        return len(self._nodes) - 1

    def after(self, node: int, dependency: int) -> None:
        """Let ``node`` start only after ``dependency``.

        Raises ExecutionError for an unknown number or when that would close a cycle.
        """
        for number in (node, dependency):
            if not 0 <= number < len(self._nodes):
                raise ExecutionError(f"the plan has no node {number}")
        if node in self._ancestors(dependency):
            raise ExecutionError(f"node {node} after {dependency} would close a cycle")
        self._before[node].add(dependency)

    def order(self) -> tuple[int, ...]:
        """The nodes in the order of submission: dependencies first, then by number."""
        missing = [len(before) for before in self._before]
        ready = [node for node, count in enumerate(missing) if count == 0]
        order = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for other, before in enumerate(self._before):
                if node in before:
                    missing[other] -= 1
                    if missing[other] == 0:
                        heapq.heappush(ready, other)
        return tuple(order)

    def execute(self) -> None:
        """Submit every replay on its stream, with an event wherever a dependency crosses streams.

        Raises what lowering raises before anything is submitted.
        """
        for node in self._nodes:
            node.graph.batch(node.inputs)
        events: dict[int, Event] = {}
        for number in self.order():
            node = self._nodes[number]
            for dependency in sorted(self._before[number]):
                if self._nodes[dependency].stream is not node.stream:
                    node.stream.wait(events[dependency])
            node.graph.replay_on(node.inputs, node.stream)
            events[number] = Event()
            events[number].record(node.stream)

    def _ancestors(self, node: int) -> set[int]:
        found: set[int] = set()
        open_nodes = [node]
        while open_nodes:
            number = open_nodes.pop()
            if number not in found:
                found.add(number)
                open_nodes += self._before[number]
        return found


def copy_buffer(
    stream: Stream,
    source: Buffer,
    destination: Buffer,
    nbytes: int,
    source_offset: int = 0,
    destination_offset: int = 0,
) -> None:
    """Copy bytes between buffers in the order of ``stream``; overlapping ranges copy correctly.

    The copy goes through mapped memory, so it waits for what was submitted before it. Raises
    ExecutionError when a range is outside its buffer.
    """
    for buffer, offset in ((source, source_offset), (destination, destination_offset)):
        if nbytes < 0 or offset < 0 or offset + nbytes > buffer.nbytes:
            raise ExecutionError(
                f"bytes {offset} to {offset + nbytes} are outside {buffer.name} "
                f"({buffer.nbytes:,} bytes)"
            )

    def copy() -> None:
        stream.synchronize()
        data = stream.tier.map(source).reshape(-1)[source_offset : source_offset + nbytes].copy()
        target = stream.tier.map(destination).reshape(-1)
        target[destination_offset : destination_offset + nbytes] = data

    stream._enqueue(copy)
