"""What the records of a trace hold. Things are numbered in the order of their records, from 0:
models, graphs, buffers, batches (a graph lowered with its buffers) and submissions.

Inputs are stored as what changed since the batch's graph was last submitted: lines of 64 bytes.
Of what came out there are digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import BY_NAME, F32, DType
from contract.ir.inputs import InputLayout
from contract.ir.nodes import BufferDecl, BufferKind
from contract.shape_key import ShapeKey
from contract.tier import Heap
from harness.trace.framing import TraceError

Bytes = NDArray[np.uint8]
LINE_BYTES = 64
DIGEST_BYTES = 16
OUTPUTS_MAX = 32
"""Outputs of a graph, as bits of a word."""
SUBMIT = np.dtype([("batch", "<u4"), ("wanted", "<u4"), ("lines", "<u4")])
PLACE = np.dtype([("buffer", "<u8"), ("offset", "<u8"), ("nbytes", "<u8")])


def digest(data: Bytes, dtype: DType) -> bytes:
    """BLAKE2b, 16 bytes, of the elements of a buffer; of binary32 -0 counts as +0 (rule R0) and
    every NaN as one."""
    if dtype is F32:
        values = data.reshape(-1).view("<f4") + np.float32(0.0)
        values[np.isnan(values)] = np.nan
        data = values.view(np.uint8)
    return hashlib.blake2b(np.ascontiguousarray(data).data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model whose weights are uploaded: its file, SHA-256 of every part of it in hex, and the
    limits of its runner."""

    path: str
    sha256: tuple[str, ...]
    limits: Mapping[str, Any]

    def pack(self) -> bytes:
        """The payload."""
        limits = dict(self.limits)
        return _json({"path": self.path, "sha256": self.sha256, "limits": limits})

    @classmethod
    def unpack(cls, payload: memoryview) -> ModelRecord:
        """Of a payload."""
        values = _object(payload)
        return cls(str(values["path"]), tuple(values["sha256"]), dict(values["limits"]))


@dataclass(frozen=True, slots=True)
class Reserve:
    """``Tier.reserve`` for a graph."""

    graph: int
    largest: ShapeKey

    def pack(self) -> bytes:
        """The payload."""
        return _json({"graph": self.graph, "largest": _sizes(self.largest)})

    @classmethod
    def unpack(cls, payload: memoryview) -> Reserve:
        """Of a payload."""
        values = _object(payload)
        return cls(values["graph"], ShapeKey(*values["largest"]))


@dataclass(frozen=True, slots=True)
class MadeBuffer:
    """``Tier.alloc``, or ``Tier.upload`` where ``heap`` is None.

    What is uploaded is of the trace's ``model``-th model; ``digest`` is that of a constant.
    """

    decl: BufferDecl
    nbytes: int
    heap: Heap | None
    model: int
    digest: str = ""

    def pack(self) -> bytes:
        """The payload."""
        decl = self.decl
        return _json(
            {
                "name": decl.name,
                "kind": decl.kind.value,
                "dtype": decl.dtype.name,
                "shape": decl.shape,
                "source": decl.source,
                "nbytes": self.nbytes,
                "heap": None if self.heap is None else self.heap.value,
                "model": self.model,
                "digest": self.digest,
            }
        )

    @classmethod
    def unpack(cls, payload: memoryview) -> MadeBuffer:
        """Of a payload."""
        values = _object(payload)
        dtype, shape = BY_NAME[values["dtype"]], tuple(values["shape"])
        kind, heap = BufferKind(values["kind"]), values["heap"]
        decl = BufferDecl(values["name"], kind, dtype, shape, values["source"])
        heap = None if heap is None else Heap(heap)
        return cls(decl, values["nbytes"], heap, values["model"], values["digest"])


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """``Tier.lower``: ``buffers`` are numbers by name."""

    graph: int
    bucket: ShapeKey
    buffers: Mapping[str, int]
    inputs: InputLayout

    def pack(self) -> bytes:
        """The payload."""
        return _json(
            {
                "graph": self.graph,
                "form": _sizes(self.bucket),
                "buffers": dict(self.buffers),
                "offsets": dict(self.inputs.offsets),
                "nbytes": self.inputs.nbytes,
            }
        )

    @classmethod
    def unpack(cls, payload: memoryview) -> BatchRecord:
        """Of a payload."""
        values = _object(payload)
        layout = InputLayout(values["offsets"], values["nbytes"])
        return cls(values["graph"], ShapeKey(*values["form"]), values["buffers"], layout)


@dataclass(frozen=True, slots=True)
class Submit:
    """``Tier.submit``: the lines of the inputs that changed, uint32[n] and uint8[n, 64].

    Bit n of ``requested`` is the graph's n-th OUTPUT buffer.
    """

    batch: int
    requested: int
    places: NDArray[np.uint32]
    lines: Bytes

    def pack(self) -> tuple[bytes, ...]:
        """The parts of the payload."""
        head = np.array((self.batch, self.requested, len(self.places)), SUBMIT)
        return head.tobytes(), self.places.astype("<u4").tobytes(), self.lines.tobytes()

    @classmethod
    def unpack(cls, payload: memoryview) -> Submit:
        """Of a payload."""
        head = np.frombuffer(payload, SUBMIT, 1)[0]
        count = int(head["lines"])
        places = np.frombuffer(payload, "<u4", count, SUBMIT.itemsize)
        lines = np.frombuffer(payload, np.uint8, -1, SUBMIT.itemsize + places.nbytes)
        return cls(int(head["batch"]), int(head["wanted"]), places, lines.reshape(-1, LINE_BYTES))


@dataclass(frozen=True, slots=True)
class Result:
    """A submission was waited for: the digests of the outputs it was to keep, in their order."""

    submission: int
    digests: tuple[bytes, ...]

    def pack(self) -> tuple[bytes, ...]:
        """The parts of the payload."""
        return (self.submission.to_bytes(8, "little"), *self.digests)

    @classmethod
    def unpack(cls, payload: memoryview) -> Result:
        """Of a payload."""
        data = bytes(payload[8:])
        parts = range(0, len(data), DIGEST_BYTES)
        digests = tuple(data[start : start + DIGEST_BYTES] for start in parts)
        return cls(int.from_bytes(payload[:8], "little"), digests)


@dataclass(frozen=True, slots=True)
class Access:
    """``Tier.write`` of ``data``, or ``Tier.read`` of bytes with the digest ``data``."""

    buffer: int
    offset: int
    nbytes: int
    data: bytes

    def pack(self) -> tuple[bytes, ...]:
        """The parts of the payload."""
        return np.array((self.buffer, self.offset, self.nbytes), PLACE).tobytes(), self.data

    @classmethod
    def unpack(cls, payload: memoryview) -> Access:
        """Of a payload."""
        buffer, offset, nbytes = np.frombuffer(payload, PLACE, 1)[0].tolist()
        return cls(buffer, offset, nbytes, bytes(payload[PLACE.itemsize :]))


class InputHistory:
    """The last inputs of every graph, and how the next ones differ from them."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], Bytes] = {}

    def changes(self, graph: int, inputs: Bytes) -> tuple[NDArray[np.uint32], Bytes]:
        """The lines by which ``inputs`` differ from the graph's last ones, and note them."""
        lines = inputs.reshape(-1, LINE_BYTES)
        latest = self._lines(graph, len(inputs))
        words = lines.view("<u8") != latest.view("<u8")
        places = np.flatnonzero(words.any(axis=1)).astype(np.uint32)
        changed = lines[places]
        latest[places] = changed
        return places, changed

    def apply(self, graph: int, nbytes: int, submit: Submit) -> Bytes:
        """The graph's inputs after the changes of ``submit``; valid until the next ones.

        Raises TraceError for a line beyond the inputs.
        """
        latest = self._lines(graph, nbytes)
        if len(submit.places) != len(submit.lines) or (submit.places >= len(latest)).any():
            raise TraceError("a submission changes inputs that its graph does not have")
        latest[submit.places] = submit.lines
        return latest.reshape(-1)

    def _lines(self, graph: int, nbytes: int) -> Bytes:
        latest = self._latest.setdefault((graph, nbytes), np.zeros(nbytes, np.uint8))
        return latest.reshape(-1, LINE_BYTES)


def _sizes(key: ShapeKey) -> list[int]:
    return [key.tokens, key.rows]


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _object(payload: memoryview) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(bytes(payload))
    return values


def outputs_of(outputs: Iterable[BufferDecl], requested: int) -> list[BufferDecl]:
    """Of a graph's OUTPUT buffers those that ``requested`` has the bits of."""
    return [decl for number, decl in enumerate(outputs) if requested >> number & 1]
