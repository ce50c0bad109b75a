"""Writes the plan of a loaded model: what the C library needs to execute its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from accel.native.names import library_name, sources_digest, this_target
from accel.native.plan_file import (
    ABI,
    ABSENT_OFFSET,
    BUCKET_RECORD,
    BUFFER_RECORD,
    DIGESTED_FROM,
    FROM_WEIGHTS,
    HEADER,
    MAX_BUFFERS,
    PLAN_MAGIC,
    WEIGHTS_HEADER,
    WEIGHTS_HEADER_BYTES,
    WEIGHTS_MAGIC,
    WEIGHTS_SUFFIX,
    ZEROED,
)
from accel.native.tier import NativeBuffer, NativeTier
from accel.native.variants import WORDS, Variant
from accel.packets.binding import bind_step, symbolic
from accel.packets.buffers import DeviceBuffer
from accel.packets.layouts import WeightLayout
from accel.packets.ops import OPS
from accel.packets.packet import OPERANDS, PACKET, aligned
from contract.arithmetic import ARITHMETIC_VERSION, PAGE_TOKENS
from contract.arrays import Bytes, Records
from contract.cached_files import replacing
from contract.errors import ConfigError, system_errors_as
from contract.execution import ExecutableGraph
from contract.lazy_dataclass import dataclass
from contract.records import OUTPUT_EVENT
from contract.shape_key import ShapeKey

ARRANGED = " (arranged)"
"""Ends the name of a weight in the layout of products."""
CHUNK = 1 << 24
REQUESTS = ("query", "output_rows", "sampling", "page_table")


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Fields of a plan's header that describe its model, but for the graph. ``limits`` are the
    header's fields of that name; ``ring`` and ``logits`` name the output buffers that hosts
    read."""

    model: str
    kv_dtype: str
    limits: Mapping[str, int]
    largest: ShapeKey
    ring: str
    logits: str


@dataclass(slots=True)
class PlanBuffers:
    """The buffers that packets refer to, numbered in the order of their first use."""

    executable: ExecutableGraph
    numbers: dict[str, int] = field(default_factory=dict)
    stored: list[tuple[str, int, Bytes | None]] = field(default_factory=list)
    """Name, bytes and contents of each; None for memory that begins as zeros."""

    def number(self, name: str, nbytes: int, contents: Bytes | None) -> int:
        """The number of a buffer, which gets one on first use."""
        if name not in self.numbers:
            if len(name.encode()) >= BUFFER_RECORD["name"].itemsize or (
                len(self.stored) == MAX_BUFFERS
            ):
                raise ConfigError(f"the model has too many or too long names of tensors: {name}")
            self.numbers[name] = len(self.stored)
            self.stored.append((name, nbytes, contents))
        return self.numbers[name]

    def address(self, name: str) -> int:
        """The symbolic address of a buffer as the graph declares it."""
        buffer = self._buffer(name)
        return symbolic(self.number(name, buffer.nbytes, buffer.source))

    def matrix(self, name: str) -> tuple[int, int, WeightLayout]:
        """The symbolic address, stride and layout of a weight for products."""
        matrix = self._buffer(name).matrix
        assert matrix is not None, f"{name} is not a matrix"
        if matrix.layout is WeightLayout.STORED:
            return self.address(name), matrix.row_bytes, matrix.layout
        host = matrix.allocation.host
        assert host is not None
        number = self.number(name + ARRANGED, host.nbytes, host)
        return symbolic(number), matrix.row_bytes, matrix.layout

    def _buffer(self, name: str) -> NativeBuffer:
        buffer = self.executable.buffer(name)
        assert isinstance(buffer, DeviceBuffer)
        return buffer


def export_plan(
    tier: NativeTier,
    executable: ExecutableGraph,
    facts: PlanFacts,
    path: Path,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write the plan to ``path`` and its weights beside it; returns the path of the weights.

    ``on_bytes`` is called with the bytes of weights written since its last call. Raises ConfigError
    for a path that cannot be written."""
    numbered = PlanBuffers(executable)
    header = np.zeros((), HEADER)
    packets = []
    for bucket in executable.buckets:
        step, schedule = tier.scheduled(executable.graph, bucket)
        packets.append(
            bind_step(step, schedule, executable.inputs, numbered.address, numbered.matrix)
        )
        header["scratch_bytes"] = max(int(header["scratch_bytes"]), schedule.shared_bytes)
        header["own_bytes"] = max(int(header["own_bytes"]), schedule.own_bytes)
    for name, buffer in (("ring", facts.ring), ("logits", facts.logits)):
        numbered.address(buffer)
        header[name] = numbered.numbers[buffer]
    _describe_model(header, facts, executable)
    _describe_machine(header, tier)
    records, parts = _laid_out(numbered)
    weights = path.with_name(path.name + WEIGHTS_SUFFIX)
    if len(weights.name.encode()) >= HEADER["weights"].itemsize:
        raise ConfigError(f"{path}: the name is too long")
    header["weights"] = weights.name.encode()
    # Neither file replaces an older one before both are complete.
    with _written(weights) as weights_file, _written(path) as plan_file:
        header["weights_bytes"], digest = _write_weights(weights_file, parts, on_bytes)
        header["weights_digest"] = np.frombuffer(digest, np.uint8)
        plan_file.write(_plan_bytes(header, records, executable.buckets, packets))
    return weights


def _describe_model(header: Records, facts: PlanFacts, executable: ExecutableGraph) -> None:
    """Fill in what the plan says of the model and of the inputs of a step."""
    for name, value in facts.limits.items():
        header[name] = value
    for name in REQUESTS:
        header[name] = executable.inputs.offsets.get(f"request.{name}", ABSENT_OFFSET)
    header["input_bytes"] = executable.inputs.nbytes
    header["tokens"], header["rows"] = facts.largest.tokens, facts.largest.rows
    header["model"] = _cut_utf8(facts.model, HEADER["model"].itemsize - 1)
    header["kv_dtype"] = facts.kv_dtype


def _describe_machine(header: Records, tier: NativeTier) -> None:
    """Fill in what the plan needs of the processor, the library and the layout of packets."""
    variant = tier.variant
    target = this_target(variant.machine)
    assert PACKET.fields is not None
    assert OUTPUT_EVENT.fields is not None
    header["magic"], header["abi"], header["header_bytes"] = PLAN_MAGIC, ABI, HEADER.itemsize
    header["needs"] = _needed_words(variant)
    header["machine"], header["variant"] = variant.machine, variant.name
    header["kernels"] = library_name(variant.name, target)
    header["kernels_digest"] = sources_digest()
    header["arithmetic"], header["page_positions"] = ARITHMETIC_VERSION, PAGE_TOKENS
    header["workers"] = tier.workers
    header["packet_bytes"], header["operands"] = PACKET.itemsize, OPERANDS
    header["operand_offset"], header["ops"] = PACKET.fields["operand"][1], len(OPS)
    header["event_bytes"] = OUTPUT_EVENT.itemsize
    header["event_token"] = OUTPUT_EVENT.fields["token"][1]


def _needed_words(variant: Variant) -> list[int]:
    """The bits that the processor must report in each word."""
    words = [0] * WORDS
    for word, bit in variant.needs:
        words[word] |= 1 << bit
    words[4] |= variant.registers
    return words


def _laid_out(numbered: PlanBuffers) -> tuple[Records, list[Bytes]]:
    """The records of all buffers, and the contents of those in the weights file in its order."""
    records = np.zeros(len(numbered.stored), BUFFER_RECORD)
    parts, end = [], 0
    for record, (name, nbytes, contents) in zip(records, numbered.stored, strict=True):
        record["name"], record["bytes"], record["memory"] = name.encode(), nbytes, ZEROED
        if contents is not None:
            record["memory"], record["offset"] = FROM_WEIGHTS, end
            record["bytes"] = contents.nbytes
            parts.append(contents)
            end += aligned(contents.nbytes)
    return records, parts


def _write_weights(
    file: BinaryIO, parts: list[Bytes], on_bytes: Callable[[int], None]
) -> tuple[int, bytes]:
    """Write the weights and their header; returns their bytes and their SHA-256."""
    digest, total = hashlib.sha256(), 0
    file.seek(WEIGHTS_HEADER_BYTES)
    for part in parts:
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        for start in range(0, flat.nbytes, CHUNK):
            piece = flat[start : start + CHUNK].data
            digest.update(piece)
            file.write(piece)
            on_bytes(len(piece))
        rest = bytes(aligned(flat.nbytes) - flat.nbytes)
        digest.update(rest)
        file.write(rest)
        total += flat.nbytes + len(rest)
    header = np.zeros((), WEIGHTS_HEADER)
    header["magic"], header["abi"], header["bytes"] = WEIGHTS_MAGIC, ABI, total
    header["digest"] = np.frombuffer(digest.digest(), np.uint8)
    file.seek(0)
    file.write(header.tobytes().ljust(WEIGHTS_HEADER_BYTES, b"\0"))
    return total, digest.digest()


def _plan_bytes(
    header: Records, records: Records, buckets: tuple[ShapeKey, ...], packets: list[Records]
) -> bytes:
    """The bytes of a plan file."""
    table = np.zeros(len(buckets), BUCKET_RECORD)
    end = HEADER.itemsize + records.nbytes + table.nbytes
    header["buffers"], header["buffers_offset"] = len(records), HEADER.itemsize
    header["buckets"], header["buckets_offset"] = len(table), HEADER.itemsize + records.nbytes
    for row, bucket, step in zip(table, buckets, packets, strict=True):
        row["tokens"], row["rows"] = bucket.tokens, bucket.rows
        row["packets_offset"], row["packets"] = end, len(step)
        end += step.nbytes
    header["file_bytes"] = end
    data = header.tobytes() + records.tobytes() + table.tobytes()
    return sealed(data + b"".join(step.tobytes() for step in packets))


def sealed(plan: bytes) -> bytes:
    """A plan with the digest of its bytes."""
    assert HEADER.fields is not None
    digest = hashlib.sha256(plan[DIGESTED_FROM:]).digest()
    start = HEADER.fields["digest"][1]
    return plan[:start] + digest + plan[DIGESTED_FROM:]


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at ``path`` when it is complete. Raises ConfigError."""
    with system_errors_as(f"{path}: cannot write"), replacing(path) as file:
        yield file


def _cut_utf8(text: str, nbytes: int) -> bytes:
    """The longest beginning of a text that is at most ``nbytes`` long in UTF-8."""
    return text.encode()[:nbytes].decode(errors="ignore").encode()
