"""The payloads of a trace's records.

Models, graphs, buffers, batches (a graph lowered with its buffers) and submissions are numbered in
the order of their records, from 0. Inputs are stored as the lines of 64 bytes that changed since
the last submission of the same graph. Results are stored as digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import ARITHMETIC_VERSION
from contract.arrays import Bytes
from contract.dtypes import BY_NAME, F32, DType
from contract.ir.inputs import InputLayout
from contract.ir.nodes import BufferDecl, BufferKind
from contract.records import record
from contract.shape_key import ShapeKey
from contract.tier import Tier
from harness.digest import file_digest
from harness.trace.framing import TraceError, TraceReader
from reference.limits import Limits
from reference.model.open import Model

LINE_BYTES = 64
DIGEST_BYTES = 16
OUTPUTS_MAX = 32
"""Most outputs of a graph, which are bits of a word."""
SUBMIT = record("u4 batch requested lines")
ACCESS = record("u8 buffer offset nbytes")


def digest(data: Bytes, dtype: DType) -> bytes:
    """The BLAKE2b digest, 16 bytes, of a buffer's elements; in binary32 -0 counts as +0 (rule R0)
    and all NaNs as equal."""
    if dtype is F32:
        # Words of copied pages may be any bits, also a signalling NaN's.
        with np.errstate(invalid="ignore"):
            values = data.reshape(-1).view("<f4") + np.float32(0.0)
        values[np.isnan(values)] = np.nan
        data = values.view(np.uint8)
    return hashlib.blake2b(np.ascontiguousarray(data).data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model: its file, the SHA-256 of every part of the file in hex, and its runner's limits."""

    path: str
    sha256: tuple[str, ...]
    limits: Mapping[str, Any]

    def pack(self) -> bytes:
        """Encode the payload."""
        limits = dict(self.limits)
        return _json({"path": self.path, "sha256": self.sha256, "limits": limits})

    @classmethod
    def unpack(cls, payload: memoryview) -> ModelRecord:
        """Decode a payload."""
        values = _object(payload)
        return cls(str(values["path"]), tuple(values["sha256"]), dict(values["limits"]))


@dataclass(frozen=True, slots=True)
class Reserve:
    """A call of ``Tier.reserve`` for a graph."""

    graph: int
    largest: ShapeKey

    def pack(self) -> bytes:
        """Encode the payload."""
        return _json({"graph": self.graph, "largest": _sizes(self.largest)})

    @classmethod
    def unpack(cls, payload: memoryview) -> Reserve:
        """Decode a payload."""
        values = _object(payload)
        return cls(values["graph"], ShapeKey(*values["largest"]))


@dataclass(frozen=True, slots=True)
class MadeBuffer:
    """A buffer from ``Tier.alloc``, or from ``Tier.upload`` if ``uploaded``.

    ``model`` is the number of the model an upload belongs to; ``digest`` is that of a constant."""

    decl: BufferDecl
    nbytes: int
    uploaded: bool
    model: int
    digest: str = ""

    def pack(self) -> bytes:
        """Encode the payload."""
        decl = self.decl
        return _json(
            {
                "name": decl.name,
                "kind": decl.kind.value,
                "dtype": decl.dtype.name,
                "shape": decl.shape,
                "source": decl.source,
                "nbytes": self.nbytes,
                "uploaded": self.uploaded,
                "model": self.model,
                "digest": self.digest,
            }
        )

    @classmethod
    def unpack(cls, payload: memoryview) -> MadeBuffer:
        """Decode a payload."""
        values = _object(payload)
        dtype, shape = BY_NAME[values["dtype"]], tuple(values["shape"])
        kind = BufferKind(values["kind"])
        decl = BufferDecl(values["name"], kind, dtype, shape, values["source"])
        return cls(decl, values["nbytes"], values["uploaded"], values["model"], values["digest"])


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A call of ``Tier.lower``; ``buffers`` maps names to buffer numbers."""

    graph: int
    bucket: ShapeKey
    buffers: Mapping[str, int]
    inputs: InputLayout

    def pack(self) -> bytes:
        """Encode the payload."""
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
        """Decode a payload."""
        values = _object(payload)
        layout = InputLayout(values["offsets"], values["nbytes"])
        return cls(values["graph"], ShapeKey(*values["form"]), values["buffers"], layout)


@dataclass(frozen=True, slots=True)
class Submit:
    """A call of ``Tier.submit``: the changed lines of the inputs, uint32[n] and uint8[n, 64].

    Bit n of ``requested`` is the graph's n-th OUTPUT buffer."""

    batch: int
    requested: int
    numbers: NDArray[np.uint32]
    lines: Bytes

    def pack(self) -> tuple[bytes, ...]:
        """Encode the payload in parts."""
        head = np.array((self.batch, self.requested, len(self.numbers)), SUBMIT)
        return head.tobytes(), self.numbers.astype("<u4").tobytes(), self.lines.tobytes()

    @classmethod
    def unpack(cls, payload: memoryview) -> Submit:
        """Decode a payload."""
        head = np.frombuffer(payload, SUBMIT, 1)[0]
        count = int(head["lines"])
        numbers = np.frombuffer(payload, "<u4", count, SUBMIT.itemsize)
        lines = np.frombuffer(payload, np.uint8, -1, SUBMIT.itemsize + numbers.nbytes)
        return cls(
            int(head["batch"]), int(head["requested"]), numbers, lines.reshape(-1, LINE_BYTES)
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a submission: the digests of the compared outputs, in their order, none if it
    failed.

    Every submission has one such record, in their order."""

    submission: int
    digests: tuple[bytes, ...]

    def pack(self) -> tuple[bytes, ...]:
        """Encode the payload in parts."""
        return (self.submission.to_bytes(8, "little"), *self.digests)

    @classmethod
    def unpack(cls, payload: memoryview) -> Result:
        """Decode a payload."""
        data = bytes(payload[8:])
        parts = range(0, len(data), DIGEST_BYTES)
        digests = tuple(data[start : start + DIGEST_BYTES] for start in parts)
        return cls(int.from_bytes(payload[:8], "little"), digests)


@dataclass(frozen=True, slots=True)
class Access:
    """A call of ``Tier.write`` of ``data``, or of ``Tier.read`` with the digest ``data`` as its
    result."""

    buffer: int
    offset: int
    nbytes: int
    data: bytes

    def pack(self) -> tuple[bytes, ...]:
        """Encode the payload in parts."""
        return np.array((self.buffer, self.offset, self.nbytes), ACCESS).tobytes(), self.data

    @classmethod
    def unpack(cls, payload: memoryview) -> Access:
        """Decode a payload."""
        buffer, offset, nbytes = np.frombuffer(payload, ACCESS, 1)[0].tolist()
        return cls(buffer, offset, nbytes, bytes(payload[ACCESS.itemsize :]))


class InputHistory:
    """The last inputs of every graph, to encode the next ones as changes."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], Bytes] = {}

    def changes(self, graph: int, inputs: Bytes) -> tuple[NDArray[np.uint32], Bytes]:
        """The lines of ``inputs`` that differ from the graph's last ones; then remember
        ``inputs``."""
        lines = inputs.reshape(-1, LINE_BYTES)
        latest = self._lines(graph, len(inputs))
        words = lines.view("<u8") != latest.view("<u8")
        numbers = np.flatnonzero(words.any(axis=1)).astype(np.uint32)
        changed = lines[numbers]
        latest[numbers] = changed
        return numbers, changed

    def apply(self, graph: int, nbytes: int, submit: Submit) -> Bytes:
        """The graph's inputs after the changes of ``submit``; valid until the next call. Raises
        TraceError for a line beyond the inputs."""
        latest = self._lines(graph, nbytes)
        if len(submit.numbers) != len(submit.lines) or (submit.numbers >= len(latest)).any():
            raise TraceError("a submission changes inputs that its graph does not have")
        latest[submit.numbers] = submit.lines
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
    """The OUTPUT buffers whose bits are set in ``requested``."""
    return [decl for number, decl in enumerate(outputs) if requested >> number & 1]


def trace_header(tier: Tier) -> dict[str, Any]:
    """The header of a trace on ``tier``."""
    info = tier.info
    return {"arithmetic": ARITHMETIC_VERSION, "device": info.device, "tier": info.name}


def check_header(reader: TraceReader) -> None:
    """Raise TraceError for a trace of another arithmetic."""
    version = reader.header.get("arithmetic")
    if version != ARITHMETIC_VERSION:
        raise TraceError(
            f"{reader.path}: was recorded with arithmetic version {version}, this build has "
            f"{ARITHMETIC_VERSION}; record the run again"
        )


def traced_model(model: Model, limits: Limits) -> ModelRecord:
    """The record of ``model``, whose runner has ``limits``. Reads the whole file."""
    sizes = {name: getattr(limits, name) for name in limits.__slots__}
    sizes["kv_dtype"] = limits.kv_dtype.name
    return ModelRecord(str(model.file.path.absolute()), _digests(model), sizes)


def check_model(traced: ModelRecord, model: Model) -> None:
    """Raise TraceError unless ``model`` is the traced one. Reads the whole file."""
    if traced.sha256 != _digests(model):
        raise TraceError(
            f"the trace was recorded with another model than {model.file.path}; "
            "give the right one with --model"
        )


def _digests(model: Model) -> tuple[str, ...]:
    return tuple(file_digest(shard.path) for shard in model.file.shards)
