"""The CUDA tier: a graph becomes packets, and a step is one CUDA graph of kernels that read
them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.cuda.bound_bucket import BoundBucket, check_layouts, move_to_first_rows
from accel.cuda.buffers import CudaBuffer, TransientMemory, Weights
from accel.cuda.driver import TIER, CudaError, open_driver
from accel.cuda.input_shift import InputShift
from accel.cuda.memory import Allocation, Memory
from accel.cuda.plan import sources_of
from accel.cuda.planning import ALONE, NOTHING, Planner
from accel.cuda.program import Compiler
from accel.cuda.recorded_bucket import recorded_bucket
from accel.cuda.registered import cuda_buckets
from accel.cuda.runtime import Choices, open_runtime
from accel.cuda.streamed_weights import StreamedWeights, footprint_with
from accel.cuda.submissions import (
    INPUT_BUFFERS,
    CudaBatch,
    CudaFence,
    CudaSlot,
    CudaStep,
    CudaSubmissions,
    RecordedBucket,
)
from accel.cuda.upload import Arrived
from accel.packets.binding import bind_step
from accel.packets.buffers import outputs_of
from accel.packets.build import Progress
from accel.packets.layouts import WeightLayout, matrices_of
from accel.packets.packet import aligned
from accel.packets.shares import Share
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import LoweredBatch
from accel.packets.tier import BaseTier, tier_info
from accel.packets.weight_ring import RING, bytes_of_matrix, ring_of, streamable_weights
from contract.arrays import Bytes
from contract.draft_shift import DraftShift, ShiftsInputs
from contract.errors import DeviceLost, OutOfMemory
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, InputRows, LentBlock, input_layout
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, FiniteWords, StreamsWeights, SubmitsUnread, UploadsLater

PROMPT_TOKENS = 2048
"""Prompt tokens of a step: blocks of products fill the multiprocessors better than with 512, and an
expert of many has as many tokens as a block takes."""


class CudaTier(BaseTier[Allocation, RecordedBucket, CudaStep]):
    """See ``contract.tier``: it is a ``Tier`` and what a tier may be besides, except that it
    abandons no steps. ``device`` is a device's number or part of its name. Raises TierUnavailable
    when there is no such device, and what ``open_runtime`` raises. ``progress`` is called with a
    line before kernels are compiled. ``binding`` and ``compiler`` replace the driver and NVRTC.
    ``share`` is the part of every step that it executes as one of the devices of
    ``accel.cuda.multi_device``."""

    _memory: Memory
    _submissions: CudaSubmissions

    def __init__(
        self,
        device: str = "",
        choices: Choices | None = None,
        progress: Progress | None = None,
        binding: Any = None,
        compiler: Compiler | None = None,
        share: Share = ALONE,
    ) -> None:
        driver = open_driver(binding)
        choices = choices or Choices()
        self.share = share
        runtime = open_runtime(driver, device, choices, progress, compiler)
        self._runtime = runtime
        self._streamed = StreamedWeights(runtime)
        self._shift = InputShift(runtime.memory, runtime.modules)
        self._weights = Weights(runtime, self._streamed)
        self._addresses = StepAddresses()
        self._transient = TransientMemory(runtime.memory)
        arranged_bytes = self._weights.arranged_bytes
        streams = self._streams_some
        self._planner = Planner(
            runtime.device, runtime.step, share, arranged_bytes, choices.cache, streams
        )
        found, memory = runtime.device, runtime.memory
        text = f"CUDA {found.driver_text}, NVRTC {runtime.compiler}"
        prompt_tokens = PROMPT_TOKENS
        info = tier_info(TIER, found.name, text, found.memory_bytes, prompt_tokens=prompt_tokens)
        super().__init__(info, memory, CudaSubmissions(memory))

    @property
    def name(self) -> str:
        """The device's name, with its number."""
        return self._runtime.device.numbered

    @property
    def divided(self) -> frozenset[str]:
        """Weights of the planned graph of which it has its share of the rows, and pages of which it
        has its own heads."""
        planned = self._planner.planned
        return frozenset() if planned is None else planned.needs.divided

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        return cuda_buckets(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        # Uploads follow soon, and planning leaves all cores but one idle.
        weights = graph.of_kind(BufferKind.WEIGHT)
        self._runtime.uploader.prepare(sum(buffer_bytes(decl, largest) for decl in weights))
        planned = self._planner.plan(graph, largest).footprint
        return self._streamed.footprint(graph, planned) if self._streams_some(graph) else planned

    @property
    def streams(self) -> bool:
        """See ``contract.tier.StreamsWeights``: one of several devices does not stream."""
        return self.share.count == 1

    def streamable(self, graph: Graph, largest: ShapeKey) -> Mapping[str, int]:
        needs = self._planner.plan(graph, largest, streams=True).needs
        return streamable_weights(graph, needs.steps.stored, self._device_bytes)

    @property
    def caches_experts(self) -> bool:
        return True

    def streaming_footprint(
        self, graph: Graph, largest: ShapeKey, names: Collection[str], cache: int = 0
    ) -> Footprint:
        planned = self._planner.plan(graph, largest, streams=bool(names)).footprint
        if not names:
            return planned
        ring = ring_of(graph, names, self._device_bytes)
        return footprint_with(graph, planned, ring, cache)

    def stream(self, graph: Graph, names: Collection[str], cache: int = 0) -> None:
        with self._guarded(RING):
            self._free_shared()
            self._streamed.choose(graph, names, self._device_bytes, cache)

    def link_rate(self) -> float | None:
        with self._guarded("measuring the link"), suppress(OutOfMemory):
            return self._streamed.link_rate()
        return None

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Allocate scratch memory and input buffers; kernels are built meanwhile."""
        planned = self._planner.plan(graph, largest)
        with self._guarded("reserving memory"):
            # Uploads begin at once and need these kernels first.
            self._weights.prepare(graph.buffers[name] for name in sorted(planned.needs.factors))
            for lowered in planned.buckets.values():
                self._runtime.modules.build_ahead(sources_of(lowered.plan))
            self._reserve(planned.needs.steps.shared, input_layout(graph, largest).nbytes)
            if self._streams_some(graph):
                self._streamed.reserve()
                self._submissions.before_step = self._streamed.advance
            self._transient.address(planned.needs.transient_bytes)

    def lend_inputs(self, nbytes: int) -> LentBlock:
        return self._memory.pinned.take(nbytes).view(LentBlock)

    def upload_later(
        self, decl: BufferDecl, data: Bytes, finite: FiniteWords, on_bytes: Callable[[int], None]
    ) -> CudaBuffer:
        check = self._runtime.finite

        def arrived(address: int, nbytes: int) -> None:
            check.look(address, nbytes, finite)
            on_bytes(nbytes)

        buffer = CudaBuffer(decl, data.nbytes, source=data)
        with self._guarded(decl.name):
            check.prepare()
            self._fill(buffer, arrived)
        return self._keep(buffer)

    def finish_uploads(self) -> bool:
        with self._guarded("uploading"):
            self._runtime.uploader.close()
            return self._runtime.finite.passed()

    def lower(
        self, graph: Graph, buffers: Mapping[str, CudaBuffer], bucket: ShapeKey, inputs: InputLayout
    ) -> CudaBatch:
        """Launches of every op, bound to addresses. Raises UnsupportedOp and OutOfMemory."""
        with self._guarded(f"lowering {graph.name}"):
            return self.record(self.bind(graph, buffers, bucket, inputs))

    def bind(
        self,
        graph: Graph,
        buffers: Mapping[str, CudaBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
        divided: Mapping[str, BufferDecl] = NOTHING,
    ) -> BoundBucket:
        """The first half of ``lower``: everything that needs nothing of other devices. ``divided``
        are the whole declarations of the buffers of which it has a share. Raises UnsupportedOp,
        OutOfMemory and CudaError."""
        lowered = self._planner.lowered(graph, bucket, divided)
        step, schedule, plan = lowered.step, lowered.schedule, lowered.plan
        self._runtime.modules.prepare(sources_of(plan))
        self._reserve(schedule.shared_bytes, inputs.nbytes)
        zero_copy = self._streamed.zero_copy_operands(graph, lowered, self._weights.matrix, buffers)

        def matrix_of(name: str) -> tuple[int, int, WeightLayout]:
            return zero_copy.get(name) or self._weights.matrix(buffers[name]).operand

        stored = self._weights.stored
        packets = bind_step(
            step, schedule, inputs, lambda name: stored(buffers[name]).address, matrix_of
        )
        check_layouts(step, packets, plan)
        move_to_first_rows(lowered, packets)
        self._runtime.uploader.close()
        self._streamed.fill(graph, self._weights.matrix, buffers)
        outputs = outputs_of(graph, lambda name: self._weights.stored(buffers[name]))
        allocations, workspace = [], 0
        if plan.lasting_bytes:
            allocations.append(
                self._memory.allocate(f"workspace of {graph.name}", plan.lasting_bytes)
            )
            workspace = allocations[0].address
        short = plan.short
        return BoundBucket(
            graph.name,
            bucket,
            plan,
            packets,
            allocations,
            workspace,
            inputs.nbytes,
            outputs,
            0 if short is None else inputs.offsets[short.sampling.buffer],
            self._transient.address(plan.transient_bytes),
            self._streamed.copies(lowered, self._streamed.of(graph) - zero_copy.keys(), buffers),
        )

    def record(
        self, bound: BoundBucket, peers: Sequence[tuple[CudaTier, BoundBucket]] = ()
    ) -> CudaBatch:
        """The second half of ``lower``: ``peers`` are the other devices with the same bucket, bound
        already. Raises OutOfMemory and CudaError."""
        theirs = [(tier._addresses, other) for tier, other in peers]
        made = recorded_bucket(self._runtime, bound, self._addresses, self.share.index, theirs)
        launches = len(bound.plan.launches)
        batch = LoweredBatch(bound.bucket, launches, made, bound.input_bytes, bound.outputs)
        self._submissions.prepare(batch)
        return batch

    def submit_unread(
        self, batch: CudaBatch, inputs: Bytes, rows: InputRows | None = None
    ) -> CudaFence:
        with self._guarded("submitting a step"):
            return self._submissions.submit_unread(batch, inputs, rows)

    def prepare_shifts(self) -> None:
        with self._guarded("building a kernel"):
            self._shift.prepare()

    def submit_shifted(
        self, batch: CudaBatch, inputs: Bytes, rows: InputRows | None, shift: DraftShift
    ) -> CudaFence:
        ring = self._weights.stored(shift.ring)
        change = partial(self._shift.enqueue, shift=shift, ring=ring.address)
        with self._guarded("submitting a step"):
            return self._submissions.submit_unread(batch, inputs, rows, change)

    def prepare(self, batch: CudaBatch) -> None:
        """Make the batch's graph for the current memory. Raises CudaError."""
        self._submissions.prepare(batch)

    def start(self, batch: CudaBatch, inputs: Bytes, rows: InputRows | None) -> CudaSlot:
        """See ``Submissions``. Raises CudaError."""
        return self._submissions.start(batch, inputs, rows)

    def finish(self, batch: CudaBatch, begun: CudaSlot, requested: Sequence[str]) -> CudaFence:
        """See ``Submissions``. Raises CudaError."""
        return self._submissions.finish(batch, begun, requested)

    def synchronize(self) -> None:
        """Return when nothing is running. Raises CudaError."""
        self._memory.synchronize()

    def access_peers(self, others: Sequence[CudaTier]) -> None:
        """Let kernels write to the memory of other devices. Raises TierUnavailable."""
        self._runtime.access_peers([other._runtime for other in others])

    def stop_waiting(self) -> None:
        """Make kernels that wait for other devices end."""
        self._runtime.stop_waiting()

    def close_by(self, reason: str, deadline: float) -> bool:
        """Close the device because it or another one is lost; everything submitted is lost.

        Kernels have until ``deadline``, by ``time.monotonic``, to end; a device that still runs
        then is abandoned, and the result is False."""
        self._lost = self._lost or reason
        return self._runtime.close_by(deadline)

    def _streams_some(self, graph: Graph) -> bool:
        return bool(self._streamed.of(graph))

    def _device_bytes(self, decl: BufferDecl) -> int:
        return bytes_of_matrix(decl, self._weights.arranged_bytes)

    def _fill(self, buffer: CudaBuffer, arrived: Arrived | None = None) -> None:
        """Copy an upload, arranged if some product reads it; the data is read until the first graph
        is lowered."""
        planned = self._planner.planned
        if matrices_of(buffer.decl) and (planned is None or buffer.name in planned.needs.factors):
            self._weights.matrix(buffer, arrived)
        else:
            self._weights.stored(buffer, arrived)

    def _stored(self, buffer: CudaBuffer) -> Allocation:
        return self._weights.stored(buffer)

    def _finish_uploads(self) -> None:
        self._runtime.uploader.finish()

    def _finish(self) -> None:
        self._memory.synchronize()

    def _until_done(self, fence: CudaFence, seconds: float) -> bool:
        done = super()._until_done(fence, seconds)
        if not done:
            self._runtime.abandon()
        return done

    @contextmanager
    def _translated(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except (CudaError, DeviceLost) as error:
            reason = f"{self._runtime.device.name}: {purpose} failed: {error}"
            raise DeviceLost(reason) from None

    def _give_up(self) -> None:
        self._streamed.close()
        self._runtime.close_failed()

    def _shut_down(self) -> None:
        self._streamed.close()
        self._submissions.close()
        # A method of this tier: a cycle, which only the garbage collector frees.
        self._planner.streams = lambda graph: False
        if not self._lost:
            with self._guarded("closing"):
                self._runtime.close()

    def _reserve(self, scratch_bytes: int, input_bytes: int) -> None:
        """Grow scratch memory and input buffers; batches lowered before use the new memory."""
        scratch = self._scratch_of(scratch_bytes)
        self._addresses.move(scratch.address, self._addresses.inputs)
        nbytes = INPUT_BUFFERS * aligned(input_bytes)
        given = self._grown("inputs of a step", self._submissions.input_memory, nbytes)
        self._submissions.input_memory = given
        self._addresses.move(scratch.address, given.address)


if TYPE_CHECKING:
    _conforms: type[DeviceTier[CudaBuffer, CudaBatch, CudaFence]] = CudaTier
    _uploads_later: type[UploadsLater] = CudaTier
    _streams_weights: type[StreamsWeights] = CudaTier
    _submits_unread: type[SubmitsUnread] = CudaTier
    _shifts_inputs: type[ShiftsInputs] = CudaTier
