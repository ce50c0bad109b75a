"""Recording: a tier that writes down what it is told to do, and digests of what came out."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.context_manager import ContextManager
from contract.dtypes import DType
from contract.footprint import Footprint
from contract.ir.codec import encode
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.inputs import InputLayout, InputRows
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, Heap, Kernel, PacketBatch, Tier, TierInfo
from harness.trace.framing import RecordKind, TraceWriter
from harness.trace.header import trace_header, traced_model
from harness.trace.records import (
    OUTPUTS_MAX,
    Access,
    BatchRecord,
    InputHistory,
    MadeBuffer,
    Reserve,
    Result,
    Submit,
    digest,
    outputs_of,
)
from reference.limits import Limits
from reference.model.open import Model

Bytes = NDArray[np.uint8]
WATCHED_BYTES_MAX = 1 << 16
"""Outputs up to this size are compared after every step, wanted or not: tokens are among them."""


@dataclass(frozen=True, slots=True)
class _RecordedBatch:
    """A batch, with the outputs of its graph and those that are always compared."""

    number: int
    graph: int
    batch: PacketBatch
    outputs: tuple[BufferDecl, ...]
    watched: frozenset[str]


class RecordedFence:
    """A fence that shows what was wanted, and keeps for the recorder what it compares."""

    def __init__(self, fence: Fence, requested: Sequence[str]) -> None:
        self.inner = fence
        self._requested = tuple(requested)

    @property
    def done(self) -> bool:
        """The tier's."""
        return self.inner.done

    @property
    def outputs(self) -> Mapping[str, Bytes]:
        """What was wanted of the tier's."""
        outputs = self.inner.outputs
        return {name: outputs[name] for name in self._requested if name in outputs}


@dataclass(frozen=True, slots=True)
class _RecordedSubmission:
    """A submission that nobody has waited for."""

    number: int
    fence: RecordedFence
    outputs: list[BufferDecl]


def record_on(
    tier: Tier, path: Path, model: Model, limits: Limits, *, all_outputs: bool = False
) -> RecordedTier:
    """``tier`` with a recorder to the new file ``path``, for a runner of ``model`` with ``limits``.

    Reads the whole model file. Raises ConfigError when the file cannot be written, or exists.
    """
    writer = TraceWriter(path, trace_header(tier))
    return RecordedTier(tier, writer, all_outputs=all_outputs).beside(model, limits)


class RecordedTier(ContextManager):
    """``tier`` behind a recorder; a ``contract.tier.Tier`` that owns both.

    Everything goes through unchanged. Small outputs are kept for comparison beside those that were
    wanted; ``all_outputs`` has every output compared: logits too, which costs a copy of them for
    each step. What is written through ``map`` cannot be seen: nothing of a runner does that.
    Every model has a face of its own on the same recorder: ``beside``.
    """

    def __init__(self, tier: Tier, writer: TraceWriter, *, all_outputs: bool = False) -> None:
        self._tier = tier
        self._writer = writer
        self._all_outputs = all_outputs
        self._graphs: list[Graph] = []
        self._buffers: dict[int, tuple[int, Buffer, DType]] = {}
        self._models = itertools.count()
        self._model = -1
        self._made = itertools.count()
        self._batches: dict[int, _RecordedBatch] = {}
        self._history = InputHistory()
        self._in_flight: deque[_RecordedSubmission] = deque()
        self._submissions = itertools.count()

    def beside(self, model: Model, limits: Limits) -> RecordedTier:
        """The same tier and trace for a runner of another model. Reads the whole model file."""
        face = copy.copy(self)
        self._writer.write(RecordKind.MODEL, traced_model(model, limits).pack())
        face._model = next(self._models)
        return face

    @property
    def info(self) -> TierInfo:
        """The tier's."""
        return self._tier.info

    @property
    def allocated_bytes(self) -> int:
        """The tier's."""
        return self._tier.allocated_bytes

    @property
    def available_bytes(self) -> int:
        """The tier's."""
        return self._tier.available_bytes

    def buckets(self, largest: ShapeKey) -> Sequence[ShapeKey]:
        """The tier's."""
        return self._tier.buckets(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """The tier's."""
        return self._tier.footprint(graph, largest)

    def load_kernel(self, blob: bytes) -> Kernel:
        """The tier's."""
        return self._tier.load_kernel(blob)

    def map(self, buffer: Buffer) -> Bytes:
        """The tier's; what the host writes there is not recorded."""
        return self._tier.map(buffer)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Recorded."""
        self._tier.reserve(graph, largest)
        self._writer.write(RecordKind.RESERVE, Reserve(self._graph(graph), largest).pack())

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> Buffer:
        """Recorded."""
        made = MadeBuffer(decl, nbytes, heap, self._model)
        return self._note(self._tier.alloc(decl, nbytes, heap), made)

    def upload(self, decl: BufferDecl, data: Bytes) -> Buffer:
        """Recorded without the data: the model has them."""
        constant = decl.kind is BufferKind.CONSTANT
        known = digest(data, decl.dtype).hex() if constant else ""
        made = MadeBuffer(decl, data.nbytes, None, self._model, known)
        return self._note(self._tier.upload(decl, data), made)

    def free(self, buffer: Buffer) -> None:
        """Recorded."""
        number, *_ = self._buffers.pop(id(buffer))
        self._tier.free(buffer)
        self._writer.write(RecordKind.FREE, number.to_bytes(8, "little"))

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> Bytes:
        """Recorded by its digest."""
        data = self._tier.read(buffer, offset, nbytes)
        number, _, dtype = self._buffers[id(buffer)]
        access = Access(number, offset, nbytes, digest(data, dtype))
        self._writer.write(RecordKind.READ, *access.pack())
        return data

    def write(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        """Recorded with the data."""
        self._tier.write(buffer, offset, data)
        access = Access(self._number(buffer), offset, data.nbytes, data.tobytes())
        self._writer.write(RecordKind.WRITE, *access.pack())

    def lower(
        self, graph: Graph, buffers: Mapping[str, Buffer], bucket: ShapeKey, inputs: InputLayout
    ) -> PacketBatch:
        """Recorded. Raises ValueError for a graph of more outputs than a record has bits."""
        decls = graph.of_kind(BufferKind.OUTPUT)
        if len(decls) > OUTPUTS_MAX:
            raise ValueError(f"graph {graph.name} has more than {OUTPUTS_MAX} outputs")
        batch: PacketBatch = self._tier.lower(graph, buffers, bucket, inputs)
        number = self._graph(graph)
        bound = {name: self._number(buffer) for name, buffer in buffers.items()}
        self._writer.write(RecordKind.BATCH, BatchRecord(number, bucket, bound, inputs).pack())
        most = None if self._all_outputs else WATCHED_BYTES_MAX
        watched = [d.name for d in decls if most is None or buffer_bytes(d, bucket) <= most]
        lowered = _RecordedBatch(
            len(self._batches), number, batch, tuple(decls), frozenset(watched)
        )
        self._batches[id(batch)] = lowered
        return batch

    def submit(
        self,
        batch: PacketBatch,
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> RecordedFence:
        """Recorded with what changed of the inputs, before it is done: should it end this process,
        the trace still has it."""
        lowered = self._batches[id(batch)]
        bits = sum(
            1 << number
            for number, decl in enumerate(lowered.outputs)
            if decl.name in requested or decl.name in lowered.watched
        )
        kept = outputs_of(lowered.outputs, bits)
        places, lines = self._history.changes(lowered.graph, inputs)
        self._writer.write(RecordKind.SUBMIT, *Submit(lowered.number, bits, places, lines).pack())
        self._writer.flush()
        try:
            inner = self._tier.submit(batch, inputs, [decl.name for decl in kept], rows)
        except BaseException:
            self._writer.write(RecordKind.FAILED)
            raise
        fence = RecordedFence(inner, requested)
        self._in_flight.append(_RecordedSubmission(next(self._submissions), fence, kept))
        return fence

    def wait(self, fence: RecordedFence, timeout: float | None = None) -> None:
        """Recorded with the digests of what the submission and those before it left."""
        self._tier.wait(fence.inner, timeout)
        if not any(entry.fence is fence for entry in self._in_flight):
            return
        last = None
        while last is not fence:
            entry = self._in_flight.popleft()
            last = entry.fence
            self._tier.wait(last.inner)
            outputs = last.inner.outputs
            digests = tuple(digest(outputs[d.name], d.dtype) for d in entry.outputs)
            self._writer.write(RecordKind.RESULT, *Result(entry.number, digests).pack())
        self._writer.flush()

    def close(self) -> None:
        """Close the tier, then the trace."""
        self._tier.close()
        self._writer.close()

    def _graph(self, graph: Graph) -> int:
        """The number of a graph, recorded when it is new."""
        for number, known in enumerate(self._graphs):
            if known is graph:
                return number
        self._graphs.append(graph)
        self._writer.write(RecordKind.GRAPH, encode(graph))
        return len(self._graphs) - 1

    def _note(self, buffer: Buffer, made: MadeBuffer) -> Buffer:
        self._buffers[id(buffer)] = (next(self._made), buffer, made.decl.dtype)
        self._writer.write(RecordKind.BUFFER, made.pack())
        return buffer

    def _number(self, buffer: Buffer) -> int:
        return self._buffers[id(buffer)][0]
