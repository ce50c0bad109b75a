"""One model on one tier: uploads the weights once, then executes steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from contract.errors import DeviceLost, ModelFileError
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.records import OUTPUT_EVENT, QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, Heap, Tier
from reference.exact.rotary import rotary_table
from reference.memory.recurrent import RecurrentMemory
from reference.model.families.tensors import Limits
from reference.model.open import Model
from reference.model.weights import weight_bytes

MAX_VARIANTS = 64
"""Lowered graphs kept at once: chunk sizes repeat, decode batch sizes vary slowly."""

EVENT_NUMBERS = 1 << 32
"""Ring events are numbered modulo this."""

Progress = Callable[[int], None]
"""Called with the bytes uploaded since the last call."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step a runner is built for."""

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: ``query`` QUERY_TOKEN[tokens], the rows wanted and how each is sampled.

    ``output_rows`` int32[rows] indexes query; ``sampling`` is SAMPLING[rows]; ``recent`` is
    int32[rows, recent_tokens], laid out as SAMPLING says and padded with -1; ``page_table``
    int32[slots, slot_pages].
    """

    query: NDArray[np.void]
    output_rows: NDArray[np.int32]
    sampling: NDArray[np.void]
    recent: NDArray[np.int32]
    page_table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced. ``logits`` is a view, valid until the next submission.

    ``logits`` float32[rows, vocab]; ``token`` int32[rows], -1 where a logit was not finite.
    """

    logits: NDArray[np.float32]
    token: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Submission:
    """A step under way: its completion, its size, and the number of its first ring event.

    ``query`` is QUERY_TOKEN[tokens]; the tokens of a step fed on the device are not in it.
    """

    fence: Fence
    key: ShapeKey
    first_event: int
    query: NDArray[np.void]


class ModelRunner:
    """Executes steps of ``model`` on ``tier``; owns the KV pool. A context manager.

    ``recurrent`` saves, restores and copies what delta-net layers keep of a slot's sequence.
    """

    def __init__(
        self,
        model: Model,
        tier: Tier,
        limits: Limits,
        capacity: Capacity,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.tier = tier
        self.limits = limits
        self.capacity = capacity
        self.graph: Graph = model.graph(limits)
        self._buffers: dict[str, Buffer] = {}
        self._last: Submission | None = None
        largest = ShapeKey(capacity.tokens, capacity.rows)
        try:
            tier.reserve(self.graph, largest, MAX_VARIANTS)
            for decl in self.graph.buffers.values():
                if decl.kind is not BufferKind.SCRATCH:
                    self._buffers[decl.name] = self._provide(decl, largest, progress)
        except BaseException:
            self.close()
            raise
        self._executable = ExecutableGraph(tier, self.graph, self._buffers, MAX_VARIANTS)
        self.recurrent = RecurrentMemory(tier, self.graph, self._buffers)
        self._page_table = self._mapped("request.page_table", np.int32).reshape(
            limits.slots, limits.slot_pages
        )
        self._query = self._mapped("request.query", QUERY_TOKEN)
        self._output_rows = self._mapped("request.output_rows", np.int32)
        self._sampling = self._mapped("request.sampling", SAMPLING)
        self._recent = self._mapped("request.recent", np.int32).reshape(
            capacity.rows, limits.recent_tokens
        )
        self._logits = self._mapped("output.logits", np.float32).reshape(capacity.rows, -1)
        self._token = self._mapped("output.token", np.int32)
        self._events = self._mapped("output.ring", OUTPUT_EVENT)
        self._event_count = 0

    def step(self, inputs: StepInput) -> StepOutput:
        """Execute one step and wait for it."""
        return self.collect(self.submit(inputs))

    def submit(self, inputs: StepInput) -> Submission:
        """Start a step. Everything submitted before it must have been collected."""
        tokens, rows = len(inputs.query), len(inputs.output_rows)
        self._query[:tokens] = inputs.query
        self._output_rows[:rows] = inputs.output_rows
        self._sampling[:rows] = inputs.sampling
        self._recent[:rows] = inputs.recent
        self._page_table[...] = inputs.page_table
        self.recurrent.advance(inputs.query)
        key = ShapeKey(tokens, rows)
        if not self._executable.has_variant(key):
            self._executable.record(key)
        return self._submitted(key, self._executable.replay(key), inputs.query)

    def feed(self, before: Submission) -> Submission:
        """Start the step after ``before``, the last one submitted, without waiting for it.

        Every query token of ``before`` is an output row; its query becomes the sampled token at
        the next position, which must have a page.
        """
        query = before.query.copy()
        query["position"] += 1
        self.recurrent.advance(query)
        fence = self._executable.replay(before.key, resume=True)
        return self._submitted(before.key, fence, query)

    def collect(self, submission: Submission) -> StepOutput:
        """Wait for a step. Steps are collected in the order of their submission."""
        self.tier.wait(submission.fence)
        rows = submission.key.rows
        if rows > self.limits.slots:
            return StepOutput(self._logits[:rows], self._token[:rows].copy())
        numbers = submission.first_event + np.arange(rows)
        token = self._events["token"][1 + numbers % EVENT_NUMBERS % (len(self._events) - 1)]
        return StepOutput(self._logits[:rows], token)

    def _submitted(self, key: ShapeKey, fence: Fence, query: NDArray[np.void]) -> Submission:
        submission = Submission(fence, key, self._event_count, query)
        self._event_count = (self._event_count + key.rows) % EVENT_NUMBERS
        self._last = submission
        return submission

    def buffer(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a non-scratch buffer, for tests and diagnosis."""
        return self.tier.map(self._buffers[name])

    def close(self) -> None:
        """Wait for the last step and free the buffers; the tier stays open."""
        if self._last is not None:
            with contextlib.suppress(DeviceLost):
                self.tier.wait(self._last.fence)
            self._last = None
        for buffer in self._buffers.values():
            self.tier.free(buffer)
        self._buffers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _provide(self, decl: BufferDecl, largest: ShapeKey, progress: Progress | None) -> Buffer:
        if decl.kind is BufferKind.WEIGHT:
            data = weight_bytes(self.model.file, decl)
            if progress is not None:
                progress(data.nbytes)
            return self.tier.upload(decl, data)
        if decl.kind is BufferKind.CONSTANT:
            table = self._rotary_table(decl.name)
            return self.tier.upload(decl, table.reshape(-1, table.shape[-1]).view(np.uint8))
        heap = {
            BufferKind.STATE: Heap.DEVICE_LOCAL,
            BufferKind.REQUEST: Heap.HOST_VISIBLE,
            BufferKind.OUTPUT: Heap.BAR,
        }[decl.kind]
        return self.tier.alloc(decl, buffer_bytes(decl, largest), heap)

    def _rotary_table(self, name: str) -> NDArray[np.float32]:
        rope = next(rope for rope in self.model.config.ropes if rope.table == name)
        tensor = rope.factors_for(self.limits.context)
        factors = None
        if tensor:
            factors = self.model.file.tensor_array(tensor).tolist()
            if not all(0.0 < factor < math.inf for factor in factors):
                raise ModelFileError(
                    self.model.file.path,
                    f"tensor {tensor}",
                    "holds a divisor that is not a positive number",
                    "fetch the file again or convert it again",
                )
        return rotary_table(self.limits.context, rope.base, rope.dims, rope.scaling, factors)

    def _mapped(self, name: str, dtype: Any) -> NDArray[Any]:
        return self.tier.map(self._buffers[name]).reshape(-1).view(dtype)
