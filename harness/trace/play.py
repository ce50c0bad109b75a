"""Replays a trace on a tier and compares the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from contract.arrays import Bytes
from contract.dtypes import DType
from contract.ir.codec import decode
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.inputs import step_of
from contract.ir.scratch import buffer_bytes
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, PacketBatch, Tier
from harness.progress import SILENT, Progress
from harness.trace import records
from harness.trace.framing import Record, RecordKind, TraceError, TraceReader
from reference.model.open import Model
from reference.model.weights import constant_bytes, weight_bytes

ModelOpener = Callable[[int, records.ModelRecord], Model]
"""Opens the n-th model of a trace."""
NONSENSE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    StopIteration,
    TypeError,
    ValueError,
)
"""Exceptions that records with invalid numbers or sizes raise."""
ROWS_SHOWN = 6
"""Most rows of a step that a message lists."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first result of a replay that differs: its submission, output and step."""

    submission: int
    output: str
    step: str

    def __str__(self) -> str:
        return f"submission {self.submission}, {self.step}: {self.output} is another"


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay. ``missing`` says which part of the run the trace lacks, "" for
    none."""

    submissions: int
    compared: int
    difference: ReplayDifference | None
    missing: str

    @property
    def whole(self) -> bool:
        """Whether every recorded result was compared."""
        return not self.missing


@dataclass(slots=True, eq=False)
class _ReplayedBatch:
    """A batch of the trace, lowered on this tier for the shape buckets needed so far."""

    batch: records.BatchRecord
    buckets: tuple[ShapeKey, ...]
    lowered: dict[ShapeKey, PacketBatch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ReplayedSubmission:
    """A submission whose results were not compared yet."""

    fence: Fence
    outputs: list[BufferDecl]
    graph: str
    step: str


def play(
    reader: TraceReader, open_it: ModelOpener, tier: Tier, progress: Progress = SILENT
) -> Replayed:
    """Replay the trace up to the first difference; ``progress`` counts its bytes.

    ``open_it`` opens the models of the trace; they must stay open until the tier is closed. Raises
    TraceError for a trace that is damaged or of another model or arithmetic, and what the tier
    raises. The tier stays open, and everything made on it is freed."""
    records.check_header(reader)
    player = _Player(open_it, tier)
    progress.start("replaying", reader.nbytes, "B")
    try:
        for record in reader.records():
            player.play(record)
            progress.advance(record.nbytes)
            if player.difference is not None:
                break
        player.settle()
        missing = player.missing if reader.whole else "its end is missing"
        return Replayed(player.submissions, player.compared, player.difference, missing)
    finally:
        progress.close()
        player.close()


class _Player:
    """The models, graphs, buffers and batches of a trace on this tier, by their numbers."""

    def __init__(self, open_it: ModelOpener, tier: Tier) -> None:
        self.submissions = 0
        self.compared = 0
        self.difference: ReplayDifference | None = None
        self._open = open_it
        self._models: list[Model] = []
        self._tier = tier
        self._graphs: list[Graph] = []
        self._buffers: list[tuple[Buffer, DType] | None] = []
        self._made: list[BufferDecl] = []
        self._batches: list[_ReplayedBatch] = []
        self._history = records.InputHistory()
        self._in_flight: dict[int, _ReplayedSubmission] = {}
        self._last: Fence | None = None
        self._latest: Record | None = None
        self._results = 0
        self._lost = 0
        self._held: tuple[_ReplayedBatch, Bytes, int] | None = None
        self._do: dict[RecordKind, Callable[[memoryview], None]] = {
            RecordKind.MODEL: self._open_model,
            RecordKind.GRAPH: lambda payload: self._graphs.append(decode(payload)),
            RecordKind.RESERVE: self._reserve,
            RecordKind.BUFFER: self._make,
            RecordKind.FREE: self._free,
            RecordKind.BATCH: self._lower,
            RecordKind.SUBMIT: self._hold,
            RecordKind.FAILED: self._drop,
            RecordKind.RESULT: self._compare,
            RecordKind.WRITE: self._write,
            RecordKind.READ: self._read,
            RecordKind.END: lambda payload: None,
        }

    def play(self, record: Record) -> None:
        """Replay one record. A submission waits for the next record, which shows that the tier
        accepted it. Raises TraceError when the record makes no sense."""
        if record.kind is not RecordKind.FAILED:
            self.settle()
        with sensible(record):
            self._do[record.kind](record.payload)
        self._latest = record

    def settle(self) -> None:
        """Replay the submission that still waits."""
        held, self._held = self._held, None
        if held is not None and self._latest is not None:
            with sensible(self._latest):
                self._submit(*held)

    @property
    def missing(self) -> str:
        """A sentence on what the records so far leave open; empty for nothing."""
        if self._in_flight:
            first = min(self._in_flight)
            return f"the results of {len(self._in_flight)} submissions from {first} on are missing"
        if self._lost:
            return f"{self._lost} submissions failed when they were recorded"
        return "" if self.compared else "it has no results"

    def close(self) -> None:
        """Wait for submissions in flight and free everything."""
        if self._last is not None:
            self._tier.wait(self._last)
        for made in self._buffers:
            if made is not None:
                self._tier.free(made[0])
        self._buffers = []

    def _open_model(self, payload: memoryview) -> None:
        traced = records.ModelRecord.unpack(payload)
        model = self._open(len(self._models), traced)
        records.check_model(traced, model)
        self._models.append(model)

    def _reserve(self, payload: memoryview) -> None:
        reserve = records.Reserve.unpack(payload)
        self._tier.reserve(self._graphs[reserve.graph], reserve.largest)

    def _make(self, payload: memoryview) -> None:
        made = records.MadeBuffer.unpack(payload)
        if made.uploaded:
            buffer = self._tier.upload(made.decl, self._uploaded(made))
        else:
            buffer = self._tier.alloc(made.decl, made.nbytes)
        self._buffers.append((buffer, made.decl.dtype))
        self._made.append(made.decl)

    def _uploaded(self, made: records.MadeBuffer) -> Bytes:
        model = self._models[made.model]
        if made.decl.kind is BufferKind.WEIGHT:
            return weight_bytes(model.file, made.decl)
        data = constant_bytes(model, made.decl)
        if records.digest(data, made.decl.dtype).hex() != made.digest:
            self._differs(made.decl.name, "before the first step")
        return data

    def _free(self, payload: memoryview) -> None:
        number = int.from_bytes(payload, "little")
        self._tier.free(self._buffer(number)[0])
        self._buffers[number] = None

    def _lower(self, payload: memoryview) -> None:
        batch = records.BatchRecord.unpack(payload)
        self._batches.append(_ReplayedBatch(batch, tuple(self._tier.buckets(batch.bucket))))

    def _hold(self, payload: memoryview) -> None:
        submit = records.Submit.unpack(payload)
        known = self._batches[submit.batch]
        layout = known.batch.inputs
        inputs = self._history.apply(known.batch.graph, layout.nbytes, submit)
        self._held = known, inputs, submit.requested

    def _drop(self, payload: memoryview) -> None:
        self._held = None

    def _submit(self, known: _ReplayedBatch, inputs: Bytes, bits: int) -> None:
        batch, graph = known.batch, self._graphs[known.batch.graph]
        requested = records.outputs_of(graph.of_kind(BufferKind.OUTPUT), bits)
        lowered = self._lowered(known, step_of(inputs))
        self._last = self._tier.submit(lowered, inputs, [decl.name for decl in requested])
        step = _describe(batch, inputs)
        self._in_flight[self.submissions] = _ReplayedSubmission(
            self._last, requested, graph.name, step
        )
        self.submissions += 1

    def _lowered(self, known: _ReplayedBatch, step: ShapeKey) -> PacketBatch:
        """The batch in the smallest shape bucket of this tier that holds ``step``."""
        batch = known.batch
        self._check_bound(batch)
        bucket = next(f for f in known.buckets if step.tokens <= f.tokens and step.rows <= f.rows)
        if bucket not in known.lowered:
            buffers = {name: self._buffer(number)[0] for name, number in batch.buffers.items()}
            graph = self._graphs[batch.graph]
            known.lowered[bucket] = self._tier.lower(graph, buffers, bucket, batch.inputs)
        return known.lowered[bucket]

    def _check_bound(self, batch: records.BatchRecord) -> None:
        """Raise TraceError when a buffer differs from the graph's buffer of its name. Graphs that
        copy rows take those of any type as words of 32 bits, so of states the size counts."""
        for decl in self._graphs[batch.graph].buffers.values():
            number = batch.buffers.get(decl.name)
            if number is None:
                continue
            made = self._made[number]
            if {made.kind, decl.kind} & {BufferKind.WEIGHT, BufferKind.CONSTANT}:
                same = made.dtype is decl.dtype and made.name == decl.name
            else:
                same = self._buffer(number)[0].nbytes >= buffer_bytes(decl, batch.bucket)
            if not same:
                raise TraceError(f"buffer {number} is {made.name!r}, the graph has {decl.name!r}")

    def _compare(self, payload: memoryview) -> None:
        result = records.Result.unpack(payload)
        if result.submission != self._results:
            raise LookupError(f"the result of submission {self._results} is missing")
        self._results += 1
        entry = self._in_flight.pop(result.submission)
        self._tier.wait(entry.fence)
        if entry.outputs and not result.digests:
            self._lost += 1
            return
        for decl, expected in zip(entry.outputs, result.digests, strict=True):
            self.compared += 1
            got = records.digest(entry.fence.outputs[decl.name], decl.dtype)
            if got != expected and self.difference is None:
                step = f"graph {entry.graph}, {entry.step}"
                self.difference = ReplayDifference(result.submission, decl.name, step)

    def _write(self, payload: memoryview) -> None:
        access = records.Access.unpack(payload)
        data = np.frombuffer(access.data, np.uint8)
        self._tier.write(self._buffer(access.buffer)[0], access.offset, data)

    def _read(self, payload: memoryview) -> None:
        access = records.Access.unpack(payload)
        buffer, dtype = self._buffer(access.buffer)
        self.compared += 1
        if (
            records.digest(self._tier.read(buffer, access.offset, access.nbytes), dtype)
            != access.data
        ):
            self._differs(buffer.name, f"bytes {access.offset} on, read after it")

    def _differs(self, name: str, where: str) -> None:
        if self.difference is None:
            self.difference = ReplayDifference(self.submissions - 1, name, where)

    def _buffer(self, number: int) -> tuple[Buffer, DType]:
        made = self._buffers[number]
        if made is None:
            raise IndexError(f"buffer {number} was freed")
        return made


@contextmanager
def sensible(record: Record) -> Iterator[None]:
    """Turn exceptions of an invalid payload into a TraceError that names the record."""
    try:
        yield
    except NONSENSE as error:
        what = f"the record {record.kind.name} at byte {record.offset} makes no sense"
        raise TraceError(f"{what}: {type(error).__name__}: {error}") from error


def _describe(batch: records.BatchRecord, inputs: Bytes) -> str:
    """The size of a step and, for a step of a model, the rows it samples."""
    step = step_of(inputs)
    text = f"{step.tokens} tokens, {step.rows} rows"
    offsets = batch.inputs.offsets
    if "request.query" not in offsets or "request.output_rows" not in offsets or not step.rows:
        return text
    query = inputs[offsets["request.query"] :][: step.tokens * QUERY_TOKEN.itemsize]
    rows = inputs[offsets["request.output_rows"] :][: step.rows * 4].view("<i4")
    sampled = query.view(QUERY_TOKEN)[rows[:ROWS_SHOWN]]
    positions = [f"{slot}@{position}" for _, slot, position, _ in sampled.tolist()]
    more = ", ..." if step.rows > ROWS_SHOWN else ""
    return f"{text} (slot@position {', '.join(positions)}{more})"
