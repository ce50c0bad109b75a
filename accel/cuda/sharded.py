"""Buffers, batches and fences that have a part on each of several devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel.cuda.buffers import CudaBuffer
from accel.cuda.submissions import CudaBatch, CudaFence
from accel.packets.in_flight import Pace
from contract.arrays import Bytes
from contract.errors import DeviceLost
from contract.ir.nodes import BufferDecl
from contract.shape_key import ShapeKey


@dataclass(slots=True, eq=False)
class ShardedBuffer:
    """A buffer of a graph; each device has all of it or its share of the rows."""

    decl: BufferDecl
    nbytes: int
    parts: tuple[CudaBuffer, ...]
    source: Bytes | None = None
    mapped: bool = False

    @property
    def name(self) -> str:
        """The name of the graph buffer."""
        return self.decl.name


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
