"""The native tier: graphs are lowered to packets, which threads of this process execute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.native.arrange import Arranger
from accel.native.library import find_library
from accel.native.mapped_files import MappedFiles
from accel.native.model_weights import ModelWeights
from accel.native.names import TIER
from accel.native.pool import MAX_WORKERS, Copies, Job, WorkerPool, copies_of
from accel.native.stored_steps import StepCache
from accel.native.variants import Variant
from accel.packets.buffers import DeviceBuffer
from accel.packets.build import Progress
from accel.packets.estimate_cache import StepMemoryCache
from accel.packets.footprint import StepMemory, worker_footprint
from accel.packets.host_memory import AddressRange, SharedMemory, aligned_bytes, total_memory
from accel.packets.layouts import lanes_bytes, matrices_of
from accel.packets.packet_tier import BoundStep, PacketTier, packets_of
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_workers
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import WorkerScratch
from accel.packets.submissions import LoweredBatch, StepFence, Submissions
from accel.packets.tier import tier_info
from accel.packets.worker_tuner import AdaptiveWorkers, WorkerChoice
from contract.cancel_token import CancelToken
from contract.dtypes import StorageClass
from contract.errors import StepAbandoned, TierUnavailable
from contract.file_reads import copy_bytes
from contract.footprint import Footprint, owns_upload
from contract.ir.inputs import InputCopy, InputLayout, InputRows, input_layout
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.lazy_dataclass import dataclass
from contract.processors import processor_name, processors
from contract.shape_key import ShapeKey
from contract.tier import AbandonsSteps, DeviceTier, FiniteWords, UploadsLater


@dataclass(frozen=True, slots=True)
class NativePackets:
    """The lowered packets of one shape bucket: their address in host memory and their number."""

    address: int
    count: int


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A submitted step. The workers read ``copies`` and ``token``, so it lives until the step has
    ended."""

    pool: WorkerPool
    number: int
    copies: Copies | None
    files: MappedFiles
    token: CancelToken | None

    def ended(self) -> bool:
        """See Completion."""
        return self.pool.done(self.number)

    def collect(self) -> None:
        """See Completion: the workers have copied the outputs. Raises ModelFileError if a file
        was cut under the step."""
        self.files.check()

    @property
    def abandoned(self) -> bool:
        """Whether its results may not be there."""
        return self.token is not None and self.token.cancelled


@dataclass(slots=True)
class TimedWorkers:
    """Chooses the workers of each step from the times of earlier steps."""

    pool: WorkerPool
    choice: WorkerChoice
    _started: deque[tuple[NativeStep, int, int, int]] = field(default_factory=deque)
    """Step, tokens, ops and workers of each step whose time was not noted yet."""

    def choose(self, tokens: int, ops: int) -> int:
        """The number of workers for the next step."""
        while self._started and self._started[0][0].ended():
            step, past_tokens, past_ops, workers = self._started.popleft()
            if not step.abandoned:
                self.choice.note(past_tokens, past_ops, workers, self.pool.seconds(step.number))
        return self.choice.choose(tokens, ops)

    def started(self, step: NativeStep, tokens: int, ops: int, workers: int) -> None:
        """Note that a step was submitted."""
        self._started.append((step, tokens, ops, workers))


@dataclass(frozen=True, slots=True)
class NativeSlot:
    """A slot in host memory, and the address of its inputs."""

    inputs: InputCopy
    address: int


class NativeSubmissions(Submissions[AddressRange, NativePackets, NativeSlot, NativeStep]):
    """See Submissions. The workers read a step's inputs in its slot."""

    def __init__(
        self, pool: WorkerPool, scratch: WorkerScratch, choice: WorkerChoice, files: MappedFiles
    ) -> None:
        super().__init__()
        self._files = files
        self._pool = pool
        self._scratch = scratch
        self._workers = TimedWorkers(pool, choice)
        self._job = Job()
        self.token: CancelToken | None = None
        """That of the step that is being submitted."""

    def cancel_all(self) -> None:
        """Cancel the tokens of the steps in flight."""
        for fence, _ in self._in_flight:
            if fence.completion.token is not None:
                fence.completion.token.cancel()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in all slots."""
        free = [slot for slots in self._free.values() for slot in slots]
        used = [slot for _, slot in self._in_flight]
        return sum(slot.inputs.data.nbytes for slot in (*free, *used))

    def _new_slot(self, batch: LoweredBatch[AddressRange, NativePackets]) -> NativeSlot:
        data = aligned_bytes(batch.input_bytes)
        return NativeSlot(InputCopy(data), data.ctypes.data)

    def _launch(
        self,
        batch: LoweredBatch[AddressRange, NativePackets],
        slot: NativeSlot,
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> NativeStep:
        tokens = self._step.tokens
        workers = self._workers.choose(tokens, batch.packets)
        scratch, bucket = self._scratch, batch.launch
        copied = [(batch.outputs[name][1].address, to) for name, to in outputs.items()]
        copies = copies_of(copied) if copied else None
        # The pool copies the job, so that one object serves every step.
        job = self._job
        job.scratch, job.own, job.own_bytes = scratch.shared, scratch.own, scratch.own_bytes
        job.input = slot.address
        job.packets, job.count = bucket.address, bucket.count
        job.copies = 0 if copies is None else copies.ctypes.data
        job.copy_count = len(copied)
        job.workers, token = workers, self.token
        job.cancelled = 0 if token is None else token.address
        step = NativeStep(self._pool, self._pool.submit(job), copies, self._files, token)
        self._workers.started(step, tokens, batch.packets, workers)
        return step


COPIED_BYTES = 1 << 15
"""Weights below this that are not arranged are copied: with the page of a mapped file that is read
first, the system enters those around it in the page table, 64 KiB."""
NativeBuffer = DeviceBuffer[AddressRange]
NativeBatch = LoweredBatch[AddressRange, NativePackets]
NativeFence = StepFence[AddressRange, NativePackets, NativeStep]


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a caller; None leaves a choice to the machine.

    ``threads`` is the number of workers; ``worker_choice`` makes, from that number, the object
    that chooses how many of them each step gets. ``memory_bytes`` is the most memory. ``cache`` is
    the folder of compiled libraries, ``weights`` that of arranged weights and ``lowered`` that of
    lowered steps; None stores none."""

    threads: int | None = None
    worker_choice: Callable[[int], WorkerChoice] = AdaptiveWorkers
    memory_bytes: int | None = None
    cache: Path | None = None
    weights: Path | None = None
    lowered: Path | None = None


class NativeTier(PacketTier[AddressRange, NativePackets, NativeStep]):
    """See ``contract.tier.Tier``. ``device`` is a part of the processor's name.

    ``progress`` is called with a line before the library is compiled. Raises TierUnavailable for
    another processor, and what ``find_library`` raises."""

    _arranger: Arranger

    def __init__(
        self, device: str = "", choices: Choices | None = None, progress: Progress | None = None
    ) -> None:
        choices = choices or Choices()
        name = processor_name()
        if device.lower() not in name.lower():
            raise TierUnavailable(TIER, f"no processor matches {device!r}", f"there is {name}")
        library = find_library(choices.cache, progress)
        workers = processors() if choices.threads is None else choices.threads
        self._pool = WorkerPool(library, max(1, min(workers, MAX_WORKERS)))
        self._variant = library.variant
        memory = SharedMemory(min(filter(None, (choices.memory_bytes, total_memory()))))
        self._arranger = Arranger(memory, self._pool)
        files = MappedFiles(library)
        self._weights = ModelWeights(self._arranger, files, choices.weights, progress)
        self._addresses = WorkerScratch()
        submissions = NativeSubmissions(
            self._pool, self._addresses, choices.worker_choice(self._pool.workers), files
        )
        self._slots = submissions
        self._stored_steps = None
        if choices.lowered is not None:
            self._stored_steps = StepCache(choices.lowered, self._pool.workers)
        memory_cache = None
        if choices.cache is not None:
            memory_cache = StepMemoryCache(choices.cache, (TIER, self._pool.workers)).of
        info = tier_info(TIER, name, library.variant.name, memory.capacity, host_unified=True)
        super().__init__(info, memory, submissions, memory_cache)

    @property
    def variant(self) -> Variant:
        """The instruction set that its library was compiled for."""
        return self._variant

    @property
    def workers(self) -> int:
        """Threads of the pool."""
        return self._pool.workers

    def upload_later(
        self,
        decl: BufferDecl,
        data: NDArray[np.uint8],
        finite: FiniteWords,
        on_bytes: Callable[[int], None],
    ) -> NativeBuffer:
        """See ``contract.tier.UploadsLater``. Matrices are arranged by ``finish_uploads``."""
        buffer: NativeBuffer = DeviceBuffer(decl, data.nbytes, source=data)
        if not (matrices_of(decl) and decl.dtype.storage is not StorageClass.FLOAT):
            with self._guarded(decl.name):
                self._fill(buffer)
        self._weights.add(buffer, finite, on_bytes)
        return self._keep(buffer)

    def finish_uploads(self) -> bool:
        """See ``contract.tier.UploadsLater``."""
        with self._guarded("uploading"):
            return self._weights.finish()

    def free(self, buffer: NativeBuffer) -> None:
        """See ``contract.tier.Tier``."""
        self._weights.forget(buffer)
        super().free(buffer)

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the host, without views of the model file.

        Inputs of steps count, and so do sources of arranged weights that are copies."""
        sources = (b.nbytes for b in self._buffers if b.source is not None and owns_upload(b.decl))
        return self._memory.held + sum(sources) + self._slots.nbytes

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, NativeBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> NativeBatch:
        """See ``contract.tier.Tier``. Packets of an earlier start serve where some are stored."""
        if self._stored_steps is None:
            return super().lower(graph, buffers, bucket, inputs)
        step = self._stored_steps.of(graph, bucket, inputs, lambda: self._steps.of(graph, bucket))
        with self._guarded(packets_of(graph)):
            self._reserve(step.shared_bytes, step.own_bytes, inputs.nbytes)
            packets = step.bound(
                lambda name: self._address(name, buffers), lambda name: self._operand(buffers[name])
            )

            def record(stored: AddressRange) -> NativePackets:
                return NativePackets(stored.address, len(packets))

            return self._batch(graph, buffers, bucket, inputs, packets, record)

    def scheduled(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        """The step of a graph for one shape bucket before it has addresses, and its schedule."""
        return self._steps.of(graph, bucket)

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        step = lower_graph(graph, bucket, self._pool.workers, TIER)
        return step, schedule_workers(step, self._pool.workers)

    def _store(
        self, graph: Graph, largest: ShapeKey, bucket: ShapeKey, lowered: tuple[Step, Schedule]
    ) -> bool:
        inputs = input_layout(graph, largest)
        steps = self._stored_steps
        return steps is not None and steps.store(graph, bucket, inputs, lowered)

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        found = worker_footprint(graph, largest, steps, self._pool.workers, shared=True)
        of_file = (d for d in graph.of_kind(BufferKind.WEIGHT) if not owns_upload(d))
        return replace(found, on_disk=self._weights.on_disk(sum(map(lanes_bytes, of_file))))

    def _upload_stored(self, name: str, data: NDArray[np.uint8]) -> AddressRange:
        memory = self._memory
        assert isinstance(memory, SharedMemory)
        if data.nbytes < COPIED_BYTES:
            copied = np.empty_like(data)
            copy_bytes(copied, data)
            data = copied
        return memory.adopt(name, data, borrowed=True)

    def _finish_uploads(self) -> None:
        self._arranger.finish()

    def _record(self, bound: BoundStep[AddressRange]) -> NativePackets:
        return NativePackets(bound.stored.address, len(bound.packets))

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        self._reserve_workers(self._addresses, self._pool.workers, shared, own)

    def submit_abandonable(
        self,
        batch: NativeBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None,
        token: CancelToken,
    ) -> NativeFence:
        """See ``contract.tier.AbandonsSteps``."""
        self._slots.token = token
        try:
            return self.submit(batch, inputs, requested, rows)
        finally:
            self._slots.token = None

    def abandon(self) -> None:
        """See ``contract.tier.AbandonsSteps``."""
        self._slots.cancel_all()

    def wait(self, fence: NativeFence, timeout: float | None = None) -> None:
        """Return once the step has ended. Also raises StepAbandoned."""
        super().wait(fence, timeout)
        if fence.completion.abandoned:
            raise StepAbandoned("the step was abandoned")

    def _finish(self) -> None:
        self._pool.finish()

    def _until_done(self, fence: NativeFence, seconds: float) -> bool:
        return self._pool.wait(fence.completion.number, seconds) and fence.done

    @contextmanager
    def _translated(self, purpose: str) -> Iterator[None]:
        yield

    def _shut_down(self) -> None:
        """Also wait for a step that timed out, since it writes to memory of this process."""
        self._pool.close()
        self._submissions.close()
        if not self._lost:
            for buffer in list(self._buffers):
                for allocation in buffer.allocations:
                    self._memory.free(allocation)
            for scratch in filter(None, (self._scratch, self._own)):
                self._memory.free(scratch)
            self._discard_recorded()
            self._scratch = self._own = None


if TYPE_CHECKING:
    _conforms: type[DeviceTier[NativeBuffer, NativeBatch, NativeFence]] = NativeTier
    _uploads_later: type[UploadsLater] = NativeTier
    _abandons: type[AbandonsSteps] = NativeTier
