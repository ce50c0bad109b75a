"""A graph on a tier: one lowered batch per shape bucket, and its replay.

All state is in buffers, and two graphs exchange data by binding the same buffer. The caller decides
when to replay a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from contract.cancel_token import CancelToken
from contract.draft_shift import DraftShift, ShiftsInputs
from contract.errors import ExecutionError
from contract.ir.inputs import InputLayout, InputRows, counts_of, input_layout, step_of
from contract.ir.nodes import BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.ir.unread_outputs import without_outputs
from contract.shape_key import ShapeKey
from contract.tier import AbandonsSteps, Buffer, Fence, PacketBatch, SubmitsUnread, Tier

STEP_LOCAL = (BufferKind.SCRATCH, BufferKind.REQUEST)
"""Kinds of buffers the caller does not bind: a step's own memory and its inputs."""
NOTHING: frozenset[str] = frozenset()
MAX_CHOSEN = 1024
"""Most kinds of steps, by their counts and requested outputs, whose batches are remembered."""


class ExecutableGraph:
    """A graph on a tier: the buffers bound to its ports, and one batch per shape bucket.

    A port is a buffer of the graph that outlives a step: its kind is neither SCRATCH nor REQUEST.
    ``largest`` is the largest step; ``inputs`` is the layout of a step's inputs, by default that of
    the graph. A step that requests no output of one of the ``optional`` or ``seldom`` groups is
    computed without the nodes that only make those. A ``seldom`` group is expected to be requested
    alone."""

    def __init__(
        self,
        tier: Tier,
        graph: Graph,
        buffers: Mapping[str, Buffer],
        largest: ShapeKey,
        optional: Collection[Collection[str]] = (),
        seldom: Collection[Collection[str]] = (),
        inputs: InputLayout | None = None,
    ) -> None:
        self.tier = tier
        self._submits_unread = tier if isinstance(tier, SubmitsUnread) else None
        self._abandons = tier if isinstance(tier, AbandonsSteps) else None
        self._shifts = tier if isinstance(tier, ShiftsInputs) else None
        self.graph = graph
        self._optional, self._seldom = (
            [frozenset(group) for group in groups if without_outputs(graph, group) is not graph]
            for groups in (optional, seldom)
        )
        self._graphs: dict[frozenset[str], Graph] = {}
        self.inputs = inputs or input_layout(graph, largest)
        self.buckets = tuple(tier.buckets(largest))
        self._largest = largest
        self._batches: dict[tuple[ShapeKey, frozenset[str]], PacketBatch] = {}
        self._chosen: dict[tuple[bytes, tuple[str, ...]], PacketBatch] = {}
        self._buffers: dict[str, Buffer] = {}
        for port, buffer in buffers.items():
            self.bind(port, buffer)

    @property
    def recorded(self) -> tuple[ShapeKey, ...]:
        """The shape buckets lowered so far."""
        return tuple(dict.fromkeys(bucket for bucket, _ in self._batches))

    def bind(self, port: str, buffer: Buffer) -> None:
        """Use ``buffer`` for ``port``; batches lowered with another buffer are dropped. Raises
        ExecutionError when the graph has no such port, and when the buffer is too small."""
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
            self._forget()
        self._buffers[port] = buffer

    def close(self) -> None:
        """Drop what was lowered and bound; no step may follow."""
        self._forget()
        self._buffers.clear()

    def _forget(self) -> None:
        self._batches.clear()
        self._chosen.clear()

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
        """Lower the graph for ``bucket`` unless that was done: with and without the nodes of each
        group of optional outputs, and with those of each seldom group alone. Other combinations are
        lowered by the first step that needs them. Raises ExecutionError if a port is unbound, and
        what ``Tier.lower`` raises."""
        seldom = NOTHING.union(*self._seldom)
        for count in range(len(self._optional) + 1):
            for left_out in combinations(self._optional, count):
                self._lowered(bucket, seldom.union(*left_out))
        for group in self._seldom:
            self._lowered(bucket, seldom.union(*self._optional) - group)

    def _lowered(self, bucket: ShapeKey, left_out: frozenset[str]) -> PacketBatch:
        """The batch of a bucket without the nodes that only make the outputs ``left_out``."""
        if (bucket, left_out) not in self._batches:
            if left_out not in self._graphs:
                self._graphs[left_out] = without_outputs(self.graph, left_out)
            graph = self._graphs[left_out]
            outside = (d.name for d in graph.buffers.values() if d.kind not in STEP_LOCAL)
            buffers = {name: self.buffer(name) for name in outside}
            self._batches[bucket, left_out] = self.tier.lower(graph, buffers, bucket, self.inputs)
        return self._batches[bucket, left_out]

    def batch(self, inputs: NDArray[np.uint8], requested: Collection[str] = ()) -> PacketBatch:
        """The batch for a step with these inputs and ``requested`` outputs, lowered on the first
        step of its kind."""
        kind = counts_of(inputs), tuple(requested)
        found = self._chosen.get(kind)
        if found is None:
            left_out = NOTHING
            for group in (*self._optional, *self._seldom):
                if group.isdisjoint(requested):
                    left_out |= group
            found = self._lowered(self.bucket_of(step_of(inputs)), left_out)
            if len(self._chosen) == MAX_CHOSEN:
                self._chosen.clear()
            self._chosen[kind] = found
        return found

    def replay(
        self,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
        unread: bool = False,
        token: CancelToken | None = None,
        shift: DraftShift | None = None,
    ) -> Fence:
        """Submit a step; see ``Tier.submit``, ``SubmitsUnread`` if it is ``unread``,
        ``AbandonsSteps`` for ``token``, and for ``shift`` ``ShiftsInputs``, which the tier is."""
        fence: Fence
        if shift is not None and self._shifts is not None:
            fence = self._shifts.submit_shifted(self.batch(inputs), inputs, rows, shift)
        elif token is not None and self._abandons is not None:
            batch = self.batch(inputs, requested)
            fence = self._abandons.submit_abandonable(batch, inputs, requested, rows, token)
        elif unread and self._submits_unread is not None:
            fence = self._submits_unread.submit_unread(self.batch(inputs), inputs, rows)
        else:
            fence = self.tier.submit(self.batch(inputs, requested), inputs, requested, rows)
        return fence
