"""Buffers, batches and fences that have a part on each of several devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from accel.cuda.buffers import CudaBuffer
from accel.cuda.submissions import CudaBatch, CudaFence
from accel.packets.head_shares import stretches_of
from accel.packets.in_flight import Pace
from contract.arrays import Bytes
from contract.errors import DeviceLost
from contract.ir.nodes import BufferDecl, BufferKind
from contract.shape_key import ShapeKey


@dataclass(slots=True, eq=False)
class ShardedBuffer:
    """A buffer of a graph; each device has all of it, its share of the rows, or its own heads."""

    decl: BufferDecl
    nbytes: int
    parts: tuple[CudaBuffer, ...]
    source: Bytes | None = None
    mapped: bool = False

    @property
    def name(self) -> str:
        """The name of the graph buffer."""
        return self.decl.name

    @property
    def is_divided(self) -> bool:
        """Whether each device has a part of it."""
        return self.parts[0].decl.shape != self.decl.shape

    @property
    def has_own_heads(self) -> bool:
        """Whether it is pages, of which each device has its own heads."""
        return self.is_divided and self.decl.kind is BufferKind.STATE

    @property
    def stretch_bytes(self) -> int:
        """Bytes of a stretch of pages, see ``accel.packets.head_shares``."""
        return self.nbytes // (int(self.decl.shape[0]) * stretches_of(self.decl))


ReadPart = Callable[[int, CudaBuffer, int, int], Bytes]
WritePart = Callable[[int, CudaBuffer, int, Bytes], None]


def read_heads(buffer: ShardedBuffer, offset: int, nbytes: int, read: ReadPart) -> Bytes:
    """Bytes of pages of all heads, read from every device's part."""
    whole, first = _stretches(buffer, offset, nbytes, read)
    return whole.reshape(-1)[offset - first : offset - first + nbytes]


def write_heads(
    buffer: ShardedBuffer, offset: int, data: Bytes, read: ReadPart, write: WritePart
) -> None:
    """Write bytes of pages of all heads to every device's part; other bytes stay."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    whole, first = _stretches(buffer, offset, flat.nbytes, read)
    whole.reshape(-1)[offset - first : offset - first + flat.nbytes] = flat
    own = np.split(whole, len(buffer.parts), axis=1)
    for number, (part, heads) in enumerate(zip(buffer.parts, own, strict=True)):
        write(number, part, first // len(buffer.parts), np.ascontiguousarray(heads).reshape(-1))


def _stretches(
    buffer: ShardedBuffer, offset: int, nbytes: int, read: ReadPart
) -> tuple[Bytes, int]:
    """The stretches that contain some bytes, uint8[stretches, bytes], and the offset of the
    first."""
    stretch, devices = buffer.stretch_bytes, len(buffer.parts)
    first, stop = offset // stretch, -(-(offset + nbytes) // stretch)
    own = stretch // devices
    parts = [
        read(number, part, first * own, (stop - first) * own).reshape(-1, own)
        for number, part in enumerate(buffer.parts)
    ]
    return np.concatenate(parts, axis=1), first * stretch


@dataclass(frozen=True, slots=True, eq=False)
class ShardedBatch:
    """A bucket's launches on every device."""

    bucket: ShapeKey
    parts: tuple[CudaBatch, ...]

    @property
    def packets(self) -> int:
        """Launches of a step on each device."""
        return self.parts[0].packets


@dataclass(frozen=True, slots=True, eq=False)
class ShardedFence:
    """The completion of one submission on all devices; errors use their ``names``."""

    parts: tuple[CudaFence, ...]
    names: tuple[str, ...]

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host. Raises DeviceLost."""
        done = True
        for part, name in zip(self.parts, self.names, strict=True):
            try:
                done = part.done and done
            except DeviceLost as error:
                raise DeviceLost(f"{name}: {error}") from None
        return done

    @property
    def outputs(self) -> Mapping[str, Bytes]:
        """The outputs of the first device; they are the same on all."""
        return self.parts[0].outputs

    @property
    def submitted(self) -> float:
        """The time of submission, by ``time.monotonic``."""
        return self.parts[-1].submitted

    @property
    def pace(self) -> Pace:
        """The recent duration of steps of this batch."""
        return self.parts[0].pace
