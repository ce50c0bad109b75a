"""The CUDA tier: a graph becomes packets, and a step one CUDA graph of kernels that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.bound_bucket import BoundBucket, check_layouts, move_to_first_rows
from accel.cuda.buffers import CudaBuffer, Weights
from accel.cuda.device import TIER
from accel.cuda.driver import CudaError, open_driver
from accel.cuda.kernel_file import CudaKernel, source_of
from accel.cuda.memory import Allocation
from accel.cuda.passing import PassingMemory
from accel.cuda.plan import sources_of
from accel.cuda.planning import ALONE, Planner
from accel.cuda.program import Compiler
from accel.cuda.recorded_bucket import recorded_bucket
from accel.cuda.registered import cuda_buckets
from accel.cuda.runtime import Choices, open_runtime
from accel.cuda.submissions import PLACES, CudaBatch, CudaFence, Submissions
from accel.cuda.upload import Arrived
from accel.packets.binding import bind_step
from accel.packets.buffers import matrices_of, outputs_of
from accel.packets.build import Progress
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS, CompletionWaiter
from accel.packets.packet import aligned
from accel.packets.rules import OPCODES
from accel.packets.shares import Share
from accel.packets.staging_buffers import sync_as
from accel.packets.step_memory import StepAddresses, grown
from contract.arithmetic import ARITHMETIC_VERSION
from contract.context_manager import ContextManager
from contract.errors import DeviceLost
from contract.footprint import Footprint
from contract.ir.inputs import InputCopy, InputLayout, InputRows, input_layout
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, FiniteWords, Heap, TierInfo, UploadsLater, check_range

PROMPT_TOKENS = 1024
"""Of a step: blocks of products fill the multiprocessors better than with 512."""


class CudaTier(ContextManager):
    """See ``contract.tier.Tier``. ``device`` is a device's number or part of its name.

    Raises TierUnavailable when there is no such device, and what ``open_runtime`` raises.
    ``progress`` is called with a line before kernels are compiled. ``binding`` and ``compiler``
    stand in for the driver and NVRTC. ``share`` is what it does of every step, as one of the
    devices of ``accel.cuda.multi_device``.
    """

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
        shared = share.count > 1
        self.share = share
        self._runtime = open_runtime(driver, device, choices, progress, compiler, shared)
        self._memory = self._runtime.memory
        self._weights = Weights(self._runtime)
        self._buffers: set[CudaBuffer] = set()
        self._scratch: Allocation | None = None
        self._places = StepAddresses()
        self._passing = PassingMemory(self._memory)
        self._submissions = Submissions(self._memory)
        self._waiting = CompletionWaiter()
        runtime = self._runtime
        arranged_bytes = self._weights.arranged_bytes
        self._planner = Planner(runtime.device, runtime.step, share, arranged_bytes, choices.cache)
        self._lost = ""
        self._closed = False

    @property
    def info(self) -> TierInfo:
        """The device, its driver and the compiler."""
        device = self._runtime.device
        return TierInfo(
            name=TIER,
            device=device.name,
            driver=f"CUDA {device.driver_text}, NVRTC {self._runtime.compiler}",
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=OPCODES,
            memory_bytes=device.memory_bytes,
            host_unified=False,
            asynchronous=True,
            prompt_tokens=PROMPT_TOKENS,
        )

    @property
    def allocated_bytes(self) -> int:
        """Memory taken from the device."""
        return self._memory.held

    @property
    def available_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        with self._guarded("asking for free memory"):
            return self._memory.available

    @property
    def name(self) -> str:
        """What its device is called among several."""
        return self._runtime.device.numbered

    @property
    def divided(self) -> frozenset[str]:
        """Weights of the planned graph of which it holds its share of the rows."""
        planned = self._planner.planned
        return frozenset() if planned is None else planned.needs.divided

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        return cuda_buckets(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        # Whoever asks is about to upload, and planning leaves all cores but one idle.
        weights = graph.of_kind(BufferKind.WEIGHT)
        self._runtime.uploader.prepare(sum(buffer_bytes(decl, largest) for decl in weights))
        return self._planner.plan(graph, largest).footprint

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Make the scratch memory and the place of a step's inputs; kernels are built meanwhile."""
        planned = self._planner.plan(graph, largest)
        with self._guarded("reserving memory"):
            # Uploads begin at once, and need theirs.
            self._weights.prepare(graph.buffers[name] for name in sorted(planned.needs.factors))
            for lowered in planned.buckets.values():
                self._runtime.modules.build_ahead(sources_of(lowered.plan))
            self._reserve(planned.needs.steps.shared, input_layout(graph, largest).nbytes)
            self._passing.address(planned.needs.passing_bytes)

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> CudaBuffer:
        """Zeroed memory. Raises OutOfMemory naming the buffer."""
        with self._guarded(f"allocating {decl.name}"):
            allocation = self._memory.allocate(decl.name, nbytes)
        sync_as(allocation, decl)
        return self._keep(CudaBuffer(decl, nbytes, heap, allocation))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> CudaBuffer:
        """A copy of ``data``, arranged for the products if it is one of their matrices.

        ``data`` is read until the first graph is lowered. Raises OutOfMemory before copying.
        """
        return self._upload(decl, data)

    def upload_later(
        self,
        decl: BufferDecl,
        data: NDArray[np.uint8],
        finite: FiniteWords,
        on_bytes: Callable[[int], None],
    ) -> CudaBuffer:
        """See ``contract.tier.UploadsLater``."""
        check = self._runtime.finite
        with self._guarded(f"uploading {decl.name}"):
            check.prepare()

        def arrived(address: int, nbytes: int) -> None:
            check.look(address, nbytes, finite)
            on_bytes(nbytes)

        return self._upload(decl, data, arrived)

    def finish_uploads(self) -> bool:
        """See ``contract.tier.UploadsLater``."""
        with self._guarded("uploading"):
            self._runtime.uploader.close()
            return self._runtime.finite.passed()

    def _upload(
        self, decl: BufferDecl, data: NDArray[np.uint8], arrived: Arrived | None = None
    ) -> CudaBuffer:
        buffer = CudaBuffer(decl, data.nbytes, Heap.DEVICE_LOCAL, source=data)
        with self._guarded(f"uploading {decl.name}"):
            planned = self._planner.planned
            if matrices_of(decl) and (planned is None or decl.name in planned.needs.factors):
                self._weights.matrix(buffer, arrived)
            else:
                self._weights.stored(buffer, arrived)
        return self._keep(buffer)

    def free(self, buffer: CudaBuffer) -> None:
        """Release the memory, of which nothing submitted may still be running."""
        self._buffers.remove(buffer)
        if not self._lost:
            with self._guarded(f"freeing {buffer.name}"):
                self._runtime.uploader.finish()
                for allocation in buffer.allocations:
                    self._memory.free(allocation)

    def map(self, buffer: CudaBuffer) -> NDArray[np.uint8]:
        """The bytes in host memory; a weight's are those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        assert buffer.allocation is not None
        with self._guarded(f"mapping {buffer.name}"):
            return self._memory.staging.map(buffer.allocation)

    def read(self, buffer: CudaBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        assert buffer.allocation is not None
        with self._guarded(f"reading {buffer.name}"):
            return self._memory.staging.read(buffer.allocation, offset, nbytes)

    def write(self, buffer: CudaBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        assert buffer.allocation is not None
        with self._guarded(f"writing {buffer.name}"):
            self._memory.staging.write(buffer.allocation, offset, data)

    def load_kernel(self, blob: bytes) -> CudaKernel:
        """Build a ``.zrt`` file of CUDA C++ source that defines a kernel of its name."""
        header, source = source_of(blob)
        with self._guarded(f"loading kernel {header.name}"):
            return CudaKernel(header, self._runtime.modules.function(source, header.name))

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, CudaBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
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
    ) -> BoundBucket:
        """The first half of ``lower``: everything but what other devices have to tell. Raises
        UnsupportedOp, OutOfMemory and CudaError."""
        declared = graph.buffers
        divided = {n for n, buffer in buffers.items() if buffer.decl.shape != declared[n].shape}
        lowered = self._planner.lowered(graph, bucket, divided)
        step, schedule, plan = lowered.step, lowered.schedule, lowered.plan
        self._runtime.modules.prepare(sources_of(plan))
        self._reserve(schedule.shared_bytes, inputs.nbytes)
        packets = bind_step(
            step,
            schedule,
            inputs,
            lambda name: self._weights.stored(buffers[name]).address,
            lambda name: self._weights.matrix(buffers[name]).operand,
        )
        check_layouts(step, packets, plan)
        move_to_first_rows(lowered, packets)
        self._runtime.uploader.close()
        outputs = outputs_of(graph, lambda name: self._weights.stored(buffers[name]))
        kept, workspace = [], 0
        if plan.own_bytes:
            kept.append(self._memory.allocate(f"workspace of {graph.name}", plan.own_bytes))
            workspace = kept[0].address
        short = plan.short
        return BoundBucket(
            graph.name,
            bucket,
            plan,
            packets,
            kept,
            workspace,
            inputs.nbytes,
            outputs,
            0 if short is None else inputs.offsets[short.sampling.buffer],
            self._passing.address(plan.passing_bytes),
        )

    def record(
        self, bound: BoundBucket, peers: Sequence[tuple[CudaTier, BoundBucket]] = ()
    ) -> CudaBatch:
        """The second half: ``peers`` are the other devices with the same form, whose memory is
        there. Raises OutOfMemory and CudaError."""
        theirs = [(tier._places, other) for tier, other in peers]
        made = recorded_bucket(self._runtime, bound, self._places, self.share.index, theirs)
        launches = len(bound.plan.launches)
        batch = CudaBatch(
            bound.bucket, launches, made.whole, bound.input_bytes, bound.outputs, made.short
        )
        self._submissions.prepare(batch)
        return batch

    def submit(
        self,
        batch: CudaBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> CudaFence:
        """Enqueue the step. Raises DeviceLost once the device has failed."""
        with self._guarded("submitting a step"):
            return self._submissions.submit(batch, inputs, requested, rows)

    def prepare(self, batch: CudaBatch) -> None:
        """Make its graph for the memory of now. Raises CudaError."""
        self._submissions.prepare(batch)

    def start(
        self, batch: CudaBatch, inputs: NDArray[np.uint8], rows: InputRows | None
    ) -> InputCopy:
        """See ``Submissions``. Raises CudaError."""
        return self._submissions.start(batch, inputs, rows)

    def finish(self, batch: CudaBatch, begun: InputCopy, requested: Sequence[str]) -> CudaFence:
        """See ``Submissions``. Raises CudaError."""
        return self._submissions.finish(batch, begun, requested)

    def synchronize(self) -> None:
        """Return when nothing is running. Raises CudaError."""
        self._memory.synchronize()

    def reach(self, others: Sequence[CudaTier]) -> None:
        """Let kernels write to the memory of other devices. Raises TierUnavailable."""
        self._runtime.reach([other._runtime for other in others])

    def stop_waiting(self) -> None:
        """Let kernels that wait for other devices come to an end."""
        self._runtime.stop_waiting()

    def give_back(self, reason: str, deadline: float) -> None:
        """Another device is lost, or this one: everything submitted is. Kernels have until
        ``deadline``, by ``time.monotonic``, to end; a device that still runs then is left alone."""
        self._lost = self._lost or reason
        self._runtime.give_back(deadline)

    def wait(self, fence: CudaFence, timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            if self._waiting.until_done(fence, seconds):
                return
        self._runtime.abandon()
        raise self._fail(f"a step did not end within {seconds:g} s")

    def close(self) -> None:
        """Wait for the device, then free all buffers."""
        if self._closed:
            return
        self._closed = True
        self._submissions.close()
        self._buffers.clear()
        if not self._lost:
            with self._guarded("closing"):
                self._runtime.close()

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Raises DeviceLost when the device has failed, before or meanwhile."""
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            yield
        except (CudaError, DeviceLost) as error:
            self._runtime.give_up()
            raise self._fail(f"{what} failed: {error}") from None

    def _fail(self, reason: str) -> DeviceLost:
        self._lost = f"{self._runtime.device.name}: {reason}"
        return DeviceLost(self._lost)

    def _keep(self, buffer: CudaBuffer) -> CudaBuffer:
        self._buffers.add(buffer)
        return buffer

    def _reserve(self, scratch_bytes: int, input_bytes: int) -> None:
        """Grow what steps share; batches lowered before follow it."""
        self._scratch = self._grown("scratch", self._scratch, scratch_bytes)
        self._places.move(self._scratch.address, self._places.inputs)
        nbytes = PLACES * aligned(input_bytes)
        place = self._grown("inputs of a step", self._submissions.place, nbytes)
        self._submissions.place = place
        self._places.move(self._scratch.address, place.address)

    def _grown(self, what: str, current: Allocation | None, nbytes: int) -> Allocation:
        return grown(self._memory, self._memory.synchronize, what, current, nbytes)


if TYPE_CHECKING:
    _conforms: type[DeviceTier[CudaBuffer, CudaBatch, CudaFence]] = CudaTier
    _uploads_later: type[UploadsLater] = CudaTier
