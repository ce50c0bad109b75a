"""One model on one tier: uploads the weights once, then executes steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from contract.errors import ModelFileError
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Heap, Tier
from reference.exact.rotary import rotary_table
from reference.model.families.decoder import ROPE_FACTORS, ROPE_TABLE
from reference.model.families.tensors import Limits
from reference.model.open import Model
from reference.quant import find_nonfinite_scale

MAX_VARIANTS = 64
"""Lowered graphs kept at once: chunk sizes repeat, decode batch sizes vary slowly."""

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
    int32[rows, recent_tokens], padded with -1; ``page_table`` int32[slots, slot_pages].
    """

    query: NDArray[np.void]
    output_rows: NDArray[np.int32]
    sampling: NDArray[np.void]
    recent: NDArray[np.int32]
    page_table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Views of the output buffers, valid until the next step.

    ``logits`` float32[rows, vocab]; ``token`` int32[rows], -1 where a logit was not finite.
    """

    logits: NDArray[np.float32]
    token: NDArray[np.int32]


class ModelRunner:
    """Executes steps of ``model`` on ``tier``; owns the KV pool. A context manager."""

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

    def step(self, inputs: StepInput) -> StepOutput:
        """Execute one step and wait for it."""
        tokens, rows = len(inputs.query), len(inputs.output_rows)
        self._query[:tokens] = inputs.query
        self._output_rows[:rows] = inputs.output_rows
        self._sampling[:rows] = inputs.sampling
        self._recent[:rows] = inputs.recent
        self._page_table[...] = inputs.page_table
        key = ShapeKey(tokens, rows)
        if not self._executable.has_variant(key):
            self._executable.record(key)
        self.tier.wait(self._executable.replay(key))
        return StepOutput(self._logits[:rows], self._token[:rows])

    def buffer(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a non-scratch buffer, for tests and diagnosis."""
        return self.tier.map(self._buffers[name])

    def close(self) -> None:
        """Free the buffers; the tier stays open."""
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
            data = self.model.file.tensor_bytes(decl.source)
            broken = find_nonfinite_scale(decl.dtype, data)
            if broken is not None:
                raise ModelFileError(
                    self.model.file.path,
                    f"tensor {decl.source}",
                    f"row {broken[0]} block {broken[1]} holds a NaN or infinite scale",
                    "fetch the file again or convert it again",
                )
            if progress is not None:
                progress(data.nbytes)
            return self.tier.upload(decl, data)
        if decl.name == ROPE_TABLE:
            table = self._rotary_table()
            return self.tier.upload(decl, table.reshape(-1, table.shape[-1]).view(np.uint8))
        heap = {
            BufferKind.STATE: Heap.DEVICE_LOCAL,
            BufferKind.REQUEST: Heap.HOST_VISIBLE,
            BufferKind.OUTPUT: Heap.BAR,
        }[decl.kind]
        return self.tier.alloc(decl, buffer_bytes(decl, largest), heap)

    def _rotary_table(self) -> NDArray[np.float32]:
        config = self.model.config
        factors = None
        if ROPE_FACTORS in self.model.file.tensors:
            factors = self.model.file.tensor_array(ROPE_FACTORS).tolist()
        return rotary_table(
            self.limits.context,
            config.rope_base,
            config.rotary_dim,
            config.rope_scaling,
            factors,
        )

    def _mapped(self, name: str, dtype: Any) -> NDArray[Any]:
        return self.tier.map(self._buffers[name]).reshape(-1).view(dtype)
