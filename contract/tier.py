"""The interface of a device tier: it holds named memory, lowers graphs and executes steps in order.

A tier drives one device, or several devices that share the work. It implements ``DeviceTier``:

1. Memory. ``alloc`` and ``upload`` make a buffer for each weight, constant, state and output of a
   graph. SCRATCH buffers and copies of a step's inputs are the tier's own business.
2. Lowering. ``buckets`` names the few shape buckets (most tokens and rows of a step) the tier
   wants. ``lower`` translates a verified graph to native commands, once per bucket.
3. Execution. ``submit`` queues one step and returns a fence; steps execute in order of submission.
   A step's inputs are one block of bytes that begins with its numbers of tokens and rows.
   ``submit`` copies the block, so the caller may write the next inputs at once and any number of
   steps can be in flight. ``wait`` returns when a fence is done.

A tier may fuse, repack and reorder as it likes; its results must have the bits that the arithmetic
rules define (docs/arithmetic.md). It knows nothing of sequences, tenants or priorities. A tier may
also implement the protocols ``UploadsLater``, ``LendsInputs``, ``StreamsWeights``,
``SubmitsUnread``, ``AbandonsSteps`` and ``contract.draft_shift.ShiftsInputs``; callers check with
isinstance and do without where one is missing.

``reference/cpu/tier.py`` is a complete tier; ``python -m harness.conformance`` tests one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from contract.cancel_token import CancelToken
from contract.footprint import Footprint
from contract.ir.graph import BufferDecl, Graph
from contract.ir.inputs import InputLayout, InputRows, LentBlock
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey

PROMPT_TOKENS = 256
"""Most prompt tokens of a step while other sequences decode, and on tiers that gain nothing by
more."""


@dataclass(frozen=True, slots=True)
class TierInfo:
    """The identity and abilities of an open tier, as reports and conformance packages state
    them."""

    name: str
    device: str
    driver: str
    arithmetic: str
    opcodes: frozenset[Opcode]
    memory_bytes: int
    host_unified: bool
    asynchronous: bool = False
    """True when ``submit`` returns before the step is done, so that queued steps keep the device
    busy."""
    devices: int = 1
    """Number of devices that share the work; byte sizes, those of ``Footprint`` too, are per
    device."""
    prompt_tokens: int = PROMPT_TOKENS
    """Prompt tokens of a step for which prompts are processed fastest while nothing decodes."""


class Buffer(Protocol):
    """Named device memory. All state that outlives a step is in buffers."""

    @property
    def name(self) -> str:
        """The logical name of the graph buffer it holds."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


class PacketBatch(Protocol):
    """A graph lowered for one shape bucket; it can be submitted any number of times."""

    @property
    def bucket(self) -> ShapeKey:
        """The largest step it can execute."""

    @property
    def packets(self) -> int:
        """Number of device operations one submission performs."""


class Fence(Protocol):
    """The completion and the results of one submission."""

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host."""

    @property
    def outputs(self) -> Mapping[str, NDArray[np.uint8]]:
        """The bytes of each requested OUTPUT buffer, up to the rows of the step; valid once
        ``done``. They are a copy that later submissions do not change."""


B = TypeVar("B", bound=Buffer)
P = TypeVar("P", bound=PacketBatch)
F = TypeVar("F", bound=Fence)


class DeviceTier(Protocol[B, P, F]):
    """The methods of a tier, with its own types of buffer, batch and fence.

    A tier is a context manager: leaving its ``with`` block calls ``close``.

    Methods raise ``contract.errors`` types only: OutOfMemory from ``reserve``, ``alloc`` and
    ``upload``, UnsupportedOp from ``reserve``, ``footprint`` and ``lower``, DeviceLost from
    ``submit`` and ``wait``."""

    @property
    def info(self) -> TierInfo:
        """The identity and abilities of the tier."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes the tier has allocated; views of the mapped model file do not count."""

    @property
    def available_bytes(self) -> int:
        """Bytes the tier could still allocate, as far as the device reports them."""

    def buckets(self, largest: ShapeKey) -> Sequence[ShapeKey]:
        """The shape buckets for steps up to ``largest``, smallest first. A step runs in the first
        bucket that has at least its tokens and rows; the last bucket is ``largest`` or more."""

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """The bytes ``graph`` will need on this tier when no step exceeds ``largest``. Allocates
        nothing. Raises UnsupportedOp."""

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Allocate what steps up to ``largest`` share, such as scratch memory.

        The caller does this before it makes buffers. Raises OutOfMemory and UnsupportedOp."""

    def alloc(self, decl: BufferDecl, nbytes: int) -> B:
        """Allocate zeroed memory for ``decl``, a STATE or OUTPUT buffer."""

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> B:
        """Make a read-only buffer that holds ``data`` (uint8 [rows, row_bytes]).

        A tier that can read host memory may keep a view of ``data`` instead of a copy, so ``data``
        must stay mapped until ``close``."""

    def free(self, buffer: B) -> None:
        """Release a buffer's memory; nothing submitted may still use it. Freeing it twice is an
        error of the caller."""

    def map(self, buffer: B) -> NDArray[np.uint8]:
        """The buffer's bytes in host address space, valid until the buffer is freed.

        The host sees a submission's results after ``wait``. A submission sees what the host wrote
        before it, while nothing was in flight."""

    def read(self, buffer: B, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Copy part of a buffer from ``alloc`` to the host, while nothing is in flight.

        It moves only these bytes, where ``map`` may move the whole buffer to the host. Raises
        ValueError for bytes outside the buffer."""

    def write(self, buffer: B, offset: int, data: NDArray[np.uint8]) -> None:
        """Write ``data`` into a buffer from ``alloc``, while nothing is in flight.

        The next submission sees it. Raises ValueError for bytes outside the buffer."""

    def lower(
        self, graph: Graph, buffers: Mapping[str, B], bucket: ShapeKey, inputs: InputLayout
    ) -> P:
        """Translate the graph to native commands for every step that ``bucket`` holds.

        ``buffers`` maps names to buffers for every declaration except SCRATCH and REQUEST;
        ``inputs`` gives the offset of each REQUEST buffer in a step's block of inputs."""

    def submit(
        self,
        batch: P,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> F:
        """Queue a step, to execute after everything submitted before it.

        ``inputs`` is the step's block of inputs; the tier copies it, so the caller may overwrite
        it, unless it is a LentBlock. ``rows`` describes a table in it of which only changed rows
        need to be copied again.
        ``requested`` names the OUTPUT buffers whose bytes the fence shall hold. Raises ValueError
        for more tokens or rows than the batch's bucket has."""

    def wait(self, fence: F, timeout: float | None = None) -> None:
        """Block until ``fence`` is done; raises DeviceLost after ``timeout`` seconds."""

    def close(self) -> None:
        """Free everything the tier made. Safe to call twice."""

    def __enter__(self) -> Self:
        """Return the tier."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Call ``close``."""


Tier: TypeAlias = DeviceTier[Any, Any, Any]
"""The type of a tier for callers that never look inside its buffers, batches and fences."""


@dataclass(frozen=True, slots=True)
class FiniteWords:
    """The floating-point words of a quantization block that must be finite.

    A tensor is a sequence of blocks of ``block_bytes`` bytes. Each block has little-endian words of
    ``word_bytes`` bytes at the byte offsets ``offsets`` (one or two of them). A word is infinite or
    NaN when all bits of the mask ``exponent`` are set in it."""

    block_bytes: int
    offsets: tuple[int, ...]
    word_bytes: int
    exponent: int


@runtime_checkable
class UploadsLater(Protocol):
    """A tier that copies uploaded data in the background while the caller continues.

    It checks the data for finite values itself, so that each byte is read from disk only once."""

    def upload_later(
        self,
        decl: BufferDecl,
        data: NDArray[np.uint8],
        finite: FiniteWords,
        on_bytes: Callable[[int], None],
    ) -> Any:
        """Start an upload; call ``finish_uploads`` before anything is lowered.

        Several threads call ``on_bytes`` with the number of bytes each has read."""

    def finish_uploads(self) -> bool:
        """Block until all uploads are done; False when a word that must be finite is not."""


@runtime_checkable
class LendsInputs(Protocol):
    """A tier whose device reads the inputs of a step where the host wrote them."""

    def lend_inputs(self, nbytes: int) -> LentBlock:
        """Memory for a block of inputs, which ``submit`` does not copy: nobody writes to it, and
        the caller keeps it, until the step has ended. Any thread may call this."""


@runtime_checkable
class StreamsWeights(Protocol):
    """A tier that can leave weights in host memory; every step copies them to a ring of device
    memory ahead of their use. Bits are those of weights on the device."""

    @property
    def streams(self) -> bool:
        """Whether the device has its own memory; without that nothing is gained."""

    def streamable(self, graph: Graph, largest: ShapeKey) -> Mapping[str, int]:
        """The weights that can be streamed, in the order of use, and the bytes of each."""

    @property
    def caches_experts(self) -> bool:
        """Whether matrices of streamed stacks that are used often can be on the device."""

    def streaming_footprint(
        self, graph: Graph, largest: ShapeKey, names: Collection[str], cache: int = 0
    ) -> Footprint:
        """The result of ``footprint`` if ``names`` were streamed, or a little more for lowered
        steps. None may be streamed yet. ``cache`` are bytes for experts on the device."""

    def stream(self, graph: Graph, names: Collection[str], cache: int = 0) -> None:
        """From now on stream these weights of ``graph``, none for no names, with ``cache`` bytes
        for experts on the device. The caller does this before ``reserve``, and while no graph is
        lowered."""

    def link_rate(self) -> float | None:
        """Bytes a second that are copied from host memory to the device, as measured now; None
        without memory for it."""


@runtime_checkable
class SubmitsUnread(Protocol):
    """A tier on which a step costs the host less if its results are read only after a later
    step."""

    def submit_unread(
        self, batch: Any, inputs: NDArray[np.uint8], rows: InputRows | None = None
    ) -> Any:
        """As ``submit``, for a step that requests no outputs. The host may see what it wrote to
        mapped memory only after a later step."""


@runtime_checkable
class AbandonsSteps(Protocol):
    """A tier that need not finish steps whose results are not needed."""

    def abandon(self) -> None:
        """Cancel the tokens of all steps in flight."""

    def submit_abandonable(
        self,
        batch: Any,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None,
        token: CancelToken,
    ) -> Any:
        """As ``submit``, for a step that ends at its next op once ``token`` is cancelled.

        Then ``wait``, or this call, raises StepAbandoned once nothing of the step is written any
        more; any part of its results may be there. Other steps are computed as usual."""


def check_bucket(bucket: ShapeKey, step: ShapeKey) -> None:
    """Raise ValueError unless ``step`` fits ``bucket``."""
    if step.tokens > bucket.tokens or step.rows > bucket.rows:
        raise ValueError(f"a step of {step} was submitted to a batch for at most {bucket}")


def check_range(buffer: Buffer, offset: int, nbytes: int) -> None:
    """Raise ValueError unless ``nbytes`` bytes from ``offset`` on lie in the buffer."""
    if not 0 <= offset <= offset + nbytes <= buffer.nbytes:
        raise ValueError(
            f"{buffer.name}: bytes {offset} to {offset + nbytes} of a buffer of {buffer.nbytes}"
        )
