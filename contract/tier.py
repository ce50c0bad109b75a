"""What a device tier must do. Nothing here knows of sequences, tenants or priorities.

A tier allocates named memory, lowers a verified graph to its native form for one ShapeKey, and
executes lowered batches. Whatever it fuses, repacks or reorders, the bits are those of the
arithmetic rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from contract.footprint import Footprint
from contract.ir.graph import BufferDecl, Graph
from contract.kernel import KernelHeader
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey

TIER_NAMES = ("cpu", "opencl", "vulkan", "cuda", "metal", "t1", "t2", "intel")


class Heap(Enum):
    """Where memory lives."""

    DEVICE_LOCAL = "device_local"
    """Fast for the device; the host may not be able to map it."""
    BAR = "bar"
    """Device memory the host can read: small results and rings."""
    HOST_VISIBLE = "host_visible"
    """Host memory the device can read: step inputs, staging."""


@dataclass(frozen=True, slots=True)
class TierInfo:
    """Identity of a tier on one device, as it goes into reports and conformance packages."""

    name: str
    device: str
    driver: str
    arithmetic: str
    opcodes: frozenset[Opcode]
    memory_bytes: int
    host_unified: bool
    asynchronous: bool = False
    """True when ``submit`` returns before the work is done, so that a queue keeps it busy."""


class Buffer(Protocol):
    """Named device memory; the only state there is."""

    @property
    def name(self) -> str:
        """The logical name of the graph buffer it holds."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def heap(self) -> Heap:
        """Where it lives."""


class Kernel(Protocol):
    """A loaded kernel."""

    @property
    def header(self) -> KernelHeader:
        """What the kernel file declared."""


class PacketBatch(Protocol):
    """A graph lowered for one ShapeKey, ready to be submitted any number of times."""

    @property
    def key(self) -> ShapeKey:
        """The sizes it was lowered for."""

    @property
    def packets(self) -> int:
        """Number of device operations one submission performs."""


class Fence(Protocol):
    """Completion of one submission."""

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host."""


class Tier(Protocol):
    """One device behind the contract. A context manager; ``close`` frees everything it made.

    Methods raise ``contract.errors`` types only: OutOfMemory from ``alloc`` and ``upload``,
    UnsupportedOp from ``lower``, DeviceLost from ``submit`` and ``wait``.
    """

    @property
    def info(self) -> TierInfo:
        """What this tier is and can do."""

    @property
    def allocated_bytes(self) -> int:
        """Memory the tier has allocated by now; views of the model file do not count."""

    @property
    def available_bytes(self) -> int:
        """Memory it could still allocate, as far as the device can say."""

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """What ``graph`` will take here when no step is larger than ``largest``; allocates nothing.

        Raises UnsupportedOp.
        """

    def reserve(self, graph: Graph, largest: ShapeKey, variants: int) -> None:
        """Before the buffers are made, set aside what steps up to ``largest`` share, and prepare
        for ``variants`` lowered steps at once. Raises OutOfMemory and UnsupportedOp."""

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> Buffer:
        """Zeroed memory for ``decl``."""

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> Buffer:
        """Memory for a read-only buffer, holding ``data`` (uint8 [rows, row_bytes]).

        A tier that can read host memory keeps a view; ``data`` stays mapped until ``close``.
        """

    def free(self, buffer: Buffer) -> None:
        """Release memory. Freeing twice is an error of the caller."""

    def map(self, buffer: Buffer) -> NDArray[np.uint8]:
        """The buffer's bytes in host address space, valid until freed. Writes are seen by the
        next submission, results are seen after ``wait``."""

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of part of a buffer from ``alloc``, while nothing submitted is running.

        Unlike ``map`` it leaves the rest where it is: for small parts of device-local memory.
        Raises ValueError for bytes outside the buffer.
        """

    def write(self, buffer: Buffer, offset: int, data: NDArray[np.uint8]) -> None:
        """Put ``data`` in a buffer from ``alloc``, while nothing submitted is running.

        The next submission sees it. Raises ValueError for bytes outside the buffer.
        """

    def load_kernel(self, blob: bytes) -> Kernel:
        """A kernel from its ``.zrt`` file; CodecError when it is not for this tier."""

    def lower(self, graph: Graph, buffers: Mapping[str, Buffer], key: ShapeKey) -> PacketBatch:
        """The graph in native form. ``buffers`` holds every buffer that is not SCRATCH."""

    def submit(self, batch: PacketBatch, *, resume: bool = False) -> Fence:
        """Start executing a batch after everything submitted before it.

        The request buffers hold what the host wrote; with ``resume``, what the batch before left
        in them, and the host has written nothing since.
        """

    def wait(self, fence: Fence, timeout: float | None = None) -> None:
        """Return when ``fence`` is done; DeviceLost after ``timeout`` seconds."""

    def close(self) -> None:
        """Free everything. Safe to call twice."""

    def __enter__(self) -> Self:
        """The tier itself."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""


def check_range(buffer: Buffer, offset: int, nbytes: int) -> None:
    """Raise ValueError unless ``nbytes`` bytes from ``offset`` on lie in the buffer."""
    if not 0 <= offset <= offset + nbytes <= buffer.nbytes:
        raise ValueError(
            f"{buffer.name}: bytes {offset} to {offset + nbytes} of a buffer of {buffer.nbytes}"
        )
