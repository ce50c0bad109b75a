"""A graph on a tier: one lowered batch per shape bucket, and its replay.

All state is in buffers, and two graphs exchange data by binding the same buffer. The caller decides
when to replay a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from contract.errors import ExecutionError
from contract.ir.inputs import InputRows, input_layout, step_of
from contract.ir.nodes import BufferKind, Graph
from contract.ir.scratch import buffer_bytes
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
