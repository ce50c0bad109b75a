"""What a device tier must do. Nothing here knows of sequences, tenants or priorities.

A tier allocates named memory, lowers a verified graph to native code once per form of a step, and
executes lowered batches in the order they are submitted. Whatever it fuses, repacks or reorders,
the bits are those of the arithmetic rules.

What a step computes is data: the block of its inputs begins with the numbers of its tokens and
rows, and ``submit`` takes a snapshot of it. So any number of steps can be under way, and the caller
may write the next inputs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from contract.footprint import Footprint
from contract.ir.graph import BufferDecl, Graph
from contract.ir.inputs import InputLayout, InputRows
from contract.kernel import KernelHeader
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey

PROMPT_TOKENS = 256
"""Prompt tokens of a step where others decode beside, and of tiers that gain nothing by more."""
TIER_NAMES = ("cpu", "native", "opencl", "vulkan", "cuda", "metal", "t1", "t2", "intel")


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
    devices: int = 1
    """How many share the work. Sizes, also of footprints, are those of one of them."""
    prompt_tokens: int = PROMPT_TOKENS
    """Of a step, with which prompts are read fastest where nobody decodes beside."""


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
    """A graph lowered for one form, ready to be submitted any number of times."""

    @property
    def bucket(self) -> ShapeKey:
        """The most tokens and rows of a step it can execute."""

    @property
    def packets(self) -> int:
        """Number of device operations one submission performs."""


class Fence(Protocol):
    """Completion of one submission."""

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host."""

    @property
    def outputs(self) -> Mapping[str, NDArray[np.uint8]]:
        """Bytes of the OUTPUT buffers that were wanted, as this submission left them: the rows its
        step has. Theirs alone, filled once ``done``."""


B = TypeVar("B", bound=Buffer)
P = TypeVar("P", bound=PacketBatch)
F = TypeVar("F", bound=Fence)


class DeviceTier(Protocol[B, P, F]):
    """One device behind the contract, with its own kinds of buffer, batch and fence.

    A context manager; ``close`` frees everything it made.

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

    def buckets(self, largest: ShapeKey) -> Sequence[ShapeKey]:
        """What steps up to ``largest`` are lowered as, smallest first: each holds the steps of at
        most its tokens and rows, the last one all."""

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """What ``graph`` will take here when no step is larger than ``largest``; allocates nothing.

        Raises UnsupportedOp.
        """

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Before the buffers are made, set aside what steps up to ``largest`` share. Raises
        OutOfMemory and UnsupportedOp."""

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> B:
        """Zeroed memory for ``decl``, a STATE or OUTPUT buffer."""

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> B:
        """Memory for a read-only buffer, holding ``data`` (uint8 [rows, row_bytes]).

        A tier that can read host memory keeps a view; ``data`` stays mapped until ``close``.
        """

    def free(self, buffer: B) -> None:
        """Release memory. Freeing twice is an error of the caller."""

    def map(self, buffer: B) -> NDArray[np.uint8]:
        """The buffer's bytes in host address space, valid until freed. Results are seen after
        ``wait``. What the host writes while nothing submitted is running, the next submission
        sees."""

    def read(self, buffer: B, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of part of a buffer from ``alloc``, while nothing submitted is running.

        Unlike ``map`` it leaves the rest where it is: for small parts of device-local memory.
        Raises ValueError for bytes outside the buffer.
        """

    def write(self, buffer: B, offset: int, data: NDArray[np.uint8]) -> None:
        """Put ``data`` in a buffer from ``alloc``, while nothing submitted is running.

        The next submission sees it. Raises ValueError for bytes outside the buffer.
        """

    def load_kernel(self, blob: bytes) -> Kernel:
        """A kernel from its ``.zrt`` file; CodecError when it is not for this tier."""

    def lower(
        self, graph: Graph, buffers: Mapping[str, B], bucket: ShapeKey, inputs: InputLayout
    ) -> P:
        """The graph in native form, for every step that ``bucket`` holds.

        ``buffers`` holds every buffer that is not SCRATCH or REQUEST; these lie in a step's inputs
        as ``inputs`` says.
        """

    def submit(
        self,
        batch: P,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> F:
        """Execute a step after everything submitted before it.

        ``inputs`` is the step's block, of which a snapshot is taken: the caller may overwrite it.
        ``rows`` says what of it need not be copied again.
        ``requested`` are the OUTPUT buffers that the fence shall hold. Raises ValueError for counts
        beyond the batch's form.
        """

    def wait(self, fence: F, timeout: float | None = None) -> None:
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


Tier: TypeAlias = DeviceTier[Any, Any, Any]
"""A tier for who hands its buffers, batches and fences back to it unseen."""


@dataclass(frozen=True, slots=True)
class FiniteWords:
    """What of each block of ``block_bytes`` has to be finite: the little-endian words of
    ``word_bytes`` at ``places``, one or two, which are not where all bits of ``exponent`` are set.
    """

    block_bytes: int
    places: tuple[int, ...]
    word_bytes: int
    exponent: int


@runtime_checkable
class UploadsLater(Protocol):
    """A tier that reads what is uploaded while its caller goes on.

    So it is the tier that looks at the data, where it has them at hand, and reads them once.
    """

    def upload_later(
        self,
        decl: BufferDecl,
        data: NDArray[np.uint8],
        finite: FiniteWords,
        on_bytes: Callable[[int], None],
    ) -> Any:
        """As ``Tier.upload``; ``finish_uploads`` has to follow before anything is lowered.

        ``on_bytes`` is called with bytes as they are read, by several threads.
        """

    def finish_uploads(self) -> bool:
        """Return when all was read: whether all that has to be finite is."""


def check_bucket(bucket: ShapeKey, step: ShapeKey) -> None:
    """Raise ValueError unless ``bucket`` holds ``step``."""
    if step.tokens > bucket.tokens or step.rows > bucket.rows:
        raise ValueError(f"a step of {step} was submitted to a batch for at most {bucket}")


def check_range(buffer: Buffer, offset: int, nbytes: int) -> None:
    """Raise ValueError unless ``nbytes`` bytes from ``offset`` on lie in the buffer."""
    if not 0 <= offset <= offset + nbytes <= buffer.nbytes:
        raise ValueError(
            f"{buffer.name}: bytes {offset} to {offset + nbytes} of a buffer of {buffer.nbytes}"
        )
