"""Records a tier's operations and digests of its results in a trace."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from contract.arrays import Bytes
from contract.context_manager import ContextManager
from contract.dtypes import DType
from contract.errors import ZincError
from contract.footprint import Footprint
from contract.ir.codec import encode
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.inputs import InputLayout, InputRows
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, PacketBatch, Tier, TierInfo
from harness.trace import records
from harness.trace.framing import RecordKind, TraceWriter
from reference.limits import Limits
from reference.model.open import Model

WATCHED_BYTES_MAX = 1 << 16
"""Outputs up to this many bytes are compared after every step, requested or not; tokens are
small."""


@dataclass(frozen=True, slots=True)
class _TracedBatch:
    """A batch, the outputs of its graph, and those that are always compared."""

    number: int
    graph: int
    batch: PacketBatch
    outputs: tuple[BufferDecl, ...]
    watched: frozenset[str]


class TracedFence:
    """A fence that returns the requested outputs; the recorder compares more of the tier's
    outputs."""

    def __init__(self, fence: Fence, requested: Sequence[str]) -> None:
        self.inner = fence
        self._requested = tuple(requested)

    @property
    def done(self) -> bool:
        """As the traced tier does."""
        return self.inner.done

    @property
    def outputs(self) -> Mapping[str, Bytes]:
        """The requested outputs."""
        outputs = self.inner.outputs
        return {name: outputs[name] for name in self._requested if name in outputs}


@dataclass(frozen=True, slots=True)
class _TracedSubmission:
    """A submission that nobody has waited for yet."""

    number: int
    fence: TracedFence
    outputs: list[BufferDecl]


def record_on(
    tier: Tier, path: Path, model: Model, limits: Limits, *, patient: bool = False
) -> TracedTier:
    """Record ``tier`` in the new file ``path``, for a runner of ``model`` with ``limits``.

    A ``patient`` recorder keeps records in memory while the disk is full. Reads the whole model
    file. Raises ConfigError when the file cannot be written, or exists."""
    writer = TraceWriter(path, records.trace_header(tier), patient=patient)
    return TracedTier(tier, writer).for_model(model, limits)


class TracedTier(ContextManager):
    """A ``contract.tier.Tier`` that records every operation and passes it to ``tier``. It owns
    both.

    Small outputs are compared even if not requested; logits are not, which would cost a copy of
    them in each step. Writes through ``map`` cannot be recorded; a runner makes none. Each model
    has its own object on the same recorder, made by ``for_model``."""

    def __init__(self, tier: Tier, writer: TraceWriter) -> None:
        self._tier = tier
        self._writer = writer
        self._graphs: list[Graph] = []
        self._buffers: dict[int, tuple[int, Buffer, DType]] = {}
        self._models = itertools.count()
        self._model = -1
        self._made = itertools.count()
        self._batches: dict[int, _TracedBatch] = {}
        self._history = records.InputHistory()
        self._in_flight: deque[_TracedSubmission] = deque()
        self._submissions = itertools.count()

    def for_model(self, model: Model, limits: Limits) -> TracedTier:
        """The same tier and trace for a runner of another model. Reads the whole model file."""
        face = copy.copy(self)
        self._writer.write(RecordKind.MODEL, records.traced_model(model, limits).pack())
        face._model = next(self._models)
        return face

    @property
    def problem(self) -> str | None:
        """Reason why records wait in memory, None when they do not."""
        return self._writer.problem

    def retry(self) -> str | None:
        """Try to write the waiting records; returns the ``problem`` that remains."""
        self._writer.flush()
        return self._writer.problem

    @property
    def _written_tier(self) -> Tier:
        """The tier, whose methods may hang or end the process: all that was recorded is in the file
        before."""
        self._writer.flush()
        return self._tier

    @property
    def info(self) -> TierInfo:
        """As the traced tier does."""
        return self._tier.info

    @property
    def allocated_bytes(self) -> int:
        """As the traced tier does."""
        return self._tier.allocated_bytes

    @property
    def available_bytes(self) -> int:
        """As the traced tier does."""
        return self._tier.available_bytes

    def buckets(self, largest: ShapeKey) -> Sequence[ShapeKey]:
        """As the traced tier does."""
        return self._tier.buckets(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """As the traced tier does."""
        return self._tier.footprint(graph, largest)

    def map(self, buffer: Buffer) -> Bytes:
        """As the traced tier does; writes through the mapping are not recorded."""
        return self._tier.map(buffer)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Record the call and make it."""
        self._written_tier.reserve(graph, largest)
        self._writer.write(RecordKind.RESERVE, records.Reserve(self._graph(graph), largest).pack())

    def alloc(self, decl: BufferDecl, nbytes: int) -> Buffer:
        """Record the call and make it."""
        made = records.MadeBuffer(decl, nbytes, uploaded=False, model=self._model)
        return self._note(self._written_tier.alloc(decl, nbytes), made)

    def upload(self, decl: BufferDecl, data: Bytes) -> Buffer:
        """Record the call without the data, which the model has, and make it."""
        constant = decl.kind is BufferKind.CONSTANT
        known = records.digest(data, decl.dtype).hex() if constant else ""
        made = records.MadeBuffer(decl, data.nbytes, uploaded=True, model=self._model, digest=known)
        return self._note(self._written_tier.upload(decl, data), made)

    def free(self, buffer: Buffer) -> None:
        """Record the call and make it."""
        number, *_ = self._buffers.pop(id(buffer))
        self._written_tier.free(buffer)
        self._writer.write(RecordKind.FREE, number.to_bytes(8, "little"))

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> Bytes:
        """Make the call and record a digest of its result."""
        data = self._written_tier.read(buffer, offset, nbytes)
        number, _, dtype = self._buffers[id(buffer)]
        access = records.Access(number, offset, nbytes, records.digest(data, dtype))
        self._writer.write(RecordKind.READ, *access.pack())
        return data

    def write(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        """Record the call with its data and make it."""
        self._written_tier.write(buffer, offset, data)
        access = records.Access(self._number(buffer), offset, data.nbytes, data.tobytes())
        self._writer.write(RecordKind.WRITE, *access.pack())

    def lower(
        self, graph: Graph, buffers: Mapping[str, Buffer], bucket: ShapeKey, inputs: InputLayout
    ) -> PacketBatch:
        """Record the call and make it. Raises ValueError for a graph of more outputs than a record
        has bits."""
        decls = graph.of_kind(BufferKind.OUTPUT)
        if len(decls) > records.OUTPUTS_MAX:
            raise ValueError(f"graph {graph.name} has more than {records.OUTPUTS_MAX} outputs")
        batch: PacketBatch = self._written_tier.lower(graph, buffers, bucket, inputs)
        number = self._graph(graph)
        bound = {name: self._number(buffer) for name, buffer in buffers.items()}
        self._writer.write(
            RecordKind.BATCH, records.BatchRecord(number, bucket, bound, inputs).pack()
        )
        watched = [d.name for d in decls if buffer_bytes(d, bucket) <= WATCHED_BYTES_MAX]
        lowered = _TracedBatch(len(self._batches), number, batch, tuple(decls), frozenset(watched))
        self._batches[id(batch)] = lowered
        return batch

    def submit(
        self,
        batch: PacketBatch,
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> TracedFence:
        """Record the changed inputs, then submit, so that the trace has the step even if it ends
        the process."""
        lowered = self._batches[id(batch)]
        bits = sum(
            1 << number
            for number, decl in enumerate(lowered.outputs)
            if decl.name in requested or decl.name in lowered.watched
        )
        outputs = records.outputs_of(lowered.outputs, bits)
        numbers, lines = self._history.changes(lowered.graph, inputs)
        self._writer.write(
            RecordKind.SUBMIT, *records.Submit(lowered.number, bits, numbers, lines).pack()
        )
        self._writer.flush()
        try:
            inner = self._tier.submit(batch, inputs, [decl.name for decl in outputs], rows)
        except BaseException:
            self._writer.write(RecordKind.FAILED)
            raise
        fence = TracedFence(inner, requested)
        self._in_flight.append(_TracedSubmission(next(self._submissions), fence, outputs))
        return fence

    def wait(self, fence: TracedFence, timeout: float | None = None) -> None:
        """Wait, and record digests of the outputs of this submission and of those before it."""
        self._written_tier.wait(fence.inner, timeout)
        if not any(entry.fence is fence for entry in self._in_flight):
            return
        last = None
        while last is not fence:
            last = self._settle()
            self._writer.flush()

    def _settle(self) -> TracedFence:
        """Wait for the oldest submission and record its outputs; nothing if it failed."""
        entry = self._in_flight.popleft()
        digests: tuple[bytes, ...] = ()
        try:
            self._tier.wait(entry.fence.inner)
            outputs = entry.fence.inner.outputs
            digests = tuple(records.digest(outputs[d.name], d.dtype) for d in entry.outputs)
        finally:
            self._writer.write(RecordKind.RESULT, *records.Result(entry.number, digests).pack())
        return entry.fence

    def close(self) -> None:
        """Close the tier, then the trace, which holds the result of every submission."""
        while self._in_flight:
            self._flush_what_can_be()
            with suppress(ZincError):
                self._settle()
        self._flush_what_can_be()
        self._tier.close()
        self._writer.close()

    def _flush_what_can_be(self) -> None:
        with suppress(ZincError):  # Closing the file says it again.
            self._writer.flush()

    def _graph(self, graph: Graph) -> int:
        """The number of a graph, recorded when it is new."""
        for number, known in enumerate(self._graphs):
            if known is graph:
                return number
        self._graphs.append(graph)
        self._writer.write(RecordKind.GRAPH, encode(graph))
        return len(self._graphs) - 1

    def _note(self, buffer: Buffer, made: records.MadeBuffer) -> Buffer:
        self._buffers[id(buffer)] = (next(self._made), buffer, made.decl.dtype)
        self._writer.write(RecordKind.BUFFER, made.pack())
        return buffer

    def _number(self, buffer: Buffer) -> int:
        return self._buffers[id(buffer)][0]
