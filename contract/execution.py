"""Execution objects over a Tier: executable graphs, streams, events and plans. They hold no policy.

An ExecutableGraph holds one lowered batch per shape bucket; its caller decides when to replay it.
All state is in buffers, and two graphs exchange data by binding the same buffer. A Plan is a
directed acyclic graph of replays, ordered by data dependencies.

A tier executes submissions in order, so a stream is a queue in front of it: an operation is
submitted once everything before it in its stream is submitted, and a wait for an event holds back
the rest of the stream until the event is recorded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from contract.errors import ExecutionError
from contract.ir.inputs import InputRows, input_layout, step_of
from contract.ir.nodes import BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, PacketBatch, Tier

STEP_LOCAL = (BufferKind.SCRATCH, BufferKind.REQUEST)
"""Kinds of buffers the caller does not bind: a step's own memory and its inputs."""


class ExecutableGraph:
    """A graph on a tier: the buffers bound to its ports, and one batch per shape bucket.

    A port is a buffer of the graph that outlives a step: its kind is neither SCRATCH nor REQUEST.
    ``largest`` is the largest step; ``inputs`` is the layout of a step's inputs.
    """

    def __init__(
        self, tier: Tier, graph: Graph, buffers: Mapping[str, Buffer], largest: ShapeKey
    ) -> None:
        self.tier = tier
        self.graph = graph
        self.inputs = input_layout(graph, largest)
        self.buckets = tuple(tier.buckets(largest))
        self._largest = largest
        self._batches: dict[ShapeKey, PacketBatch] = {}
        self._buffers: dict[str, Buffer] = {}
        for port, buffer in buffers.items():
            self.bind(port, buffer)

    @property
    def recorded(self) -> tuple[ShapeKey, ...]:
        """The shape buckets lowered so far."""
        return tuple(self._batches)

    def bind(self, port: str, buffer: Buffer) -> None:
        """Use ``buffer`` for ``port``; batches lowered with another buffer are dropped.

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
        """The buffer bound to ``port``; raises ExecutionError when there is none."""
        try:
            return self._buffers[port]
        except KeyError:
            raise ExecutionError(f"graph {self.graph.name}: port {port!r} is not bound") from None

    def bucket_of(self, step: ShapeKey) -> ShapeKey:
        """The smallest shape bucket that holds ``step``; raises ExecutionError when none does."""
        for bucket in self.buckets:
            if step.tokens <= bucket.tokens and step.rows <= bucket.rows:
                return bucket
        raise ExecutionError(
            f"graph {self.graph.name}: a step of {step} is larger than {self._largest}"
        )

    def record(self, bucket: ShapeKey) -> None:
        """Lower the graph for ``bucket`` unless that was done before.

        Raises ExecutionError when a port is unbound, and what ``Tier.lower`` raises.
        """
        if bucket not in self._batches:
            for decl in self.graph.buffers.values():
                if decl.kind not in STEP_LOCAL:
                    self.buffer(decl.name)
            self._batches[bucket] = self.tier.lower(self.graph, self._buffers, bucket, self.inputs)

    def batch(self, inputs: NDArray[np.uint8]) -> PacketBatch:
        """The batch for a step with these inputs, lowered on the first step of its bucket."""
        bucket = self.bucket_of(step_of(inputs))
        self.record(bucket)
        return self._batches[bucket]

    def replay(
        self,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> Fence:
        """Submit a step; see ``Tier.submit``."""
        fence: Fence = self.tier.submit(self.batch(inputs), inputs, requested, rows)
        return fence

    def replay_on(self, inputs: NDArray[np.uint8], stream: Stream) -> None:
        """Submit a step in the order of ``stream``."""
        stream.submit(self.batch(inputs), inputs)


class Stream:
    """A queue of operations. When an event releases several streams, higher ``priority`` goes
    first.

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
        """True while the stream waits for an event that is not recorded yet."""
        return self._blocker is not None

    def submit(self, batch: PacketBatch, inputs: NDArray[np.uint8]) -> None:
        """Submit ``batch`` after everything before it in this stream, with the present bytes of
        ``inputs``."""
        held = inputs.copy() if self.blocked else inputs

        def start() -> None:
            self._fence = self.tier.submit(batch, held)

        self._enqueue(start)

    def wait(self, event: Event) -> None:
        """Hold back every later operation until ``event`` is recorded."""

        def block() -> None:
            if not event.recorded:
                self._blocker = event
                event.waiting.append(self)

        self._enqueue(block)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until everything submitted is done.

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
    """A point in one stream that other streams can wait for. It may be recorded again."""

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
        """Append a replay that reads ``inputs`` when it is executed; returns the node's number."""
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
        """The nodes in order of submission: dependencies first, then by number."""
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
