"""The OpenCL tier: a graph becomes packets, and a step one kernel that walks them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.opencl.arrange import Arranger
from accel.opencl.device import TIER, find_device, import_binding
from accel.opencl.launcher import Mode, WorkersLost
from accel.opencl.memory import Allocation
from accel.opencl.runtime import Choices, open_runtime
from accel.opencl.submissions import OpenClBatch, OpenClFence, Submissions
from accel.packets.binding import bind_step
from accel.packets.buffers import DeviceBuffer, matrices_of, outputs_of
from accel.packets.build import Progress
from accel.packets.estimate_cache import StepMemoryCache
from accel.packets.footprint import KnownMemory, PlannedSteps, StepMemory, opencl_footprint
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS, CompletionWaiter
from accel.packets.layouts import planes_bytes
from accel.packets.rules import OPCODES, lower_graph
from accel.packets.schedule import schedule_launches, schedule_workers
from accel.packets.shape_buckets import shape_buckets
from accel.packets.staging_buffers import sync_as
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import grown
from contract.arithmetic import ARITHMETIC_VERSION
from contract.context_manager import ContextManager
from contract.errors import DeviceLost
from contract.footprint import Footprint, owns_upload
from contract.ir.inputs import InputLayout, InputRows, input_layout
from contract.ir.nodes import BufferDecl, Graph
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, TierInfo, check_range

OWN_ALIGNMENT = 256

OpenClBuffer = DeviceBuffer[Allocation]


class OpenClTier(ContextManager):
    """See ``contract.tier.Tier``. ``device`` is part of a platform's or device's name.

    Raises TierUnavailable when there is no such device, and what ``open_runtime`` raises.
    ``progress`` is called with a line before the kernels are compiled.
    """

    def __init__(
        self,
        device: str = "",
        choices: Choices | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._cl = import_binding()
        self._choices = choices or Choices()
        self._runtime = open_runtime(find_device(device), self._choices, progress)
        self._memory = self._runtime.memory
        self._arranger = Arranger(self._runtime, self._choices.cache, progress)
        self._buffers: set[OpenClBuffer] = set()
        self._scratch: Allocation | None = None
        self._own: Allocation | None = None
        self._submissions = Submissions(self._runtime.launch)
        self._waiting = CompletionWaiter()
        self._steps = PlannedSteps(self._schedule, known=self._known_memory())
        self._lost = ""

    @property
    def mode(self) -> Mode:
        """How packets get executed on this device."""
        return self._runtime.mode

    @property
    def shares_memory(self) -> bool:
        """Whether the device reads host memory, so that nothing is copied to it."""
        return self._memory.shared

    @property
    def used_bytes(self) -> int:
        """Device memory in use; uploads that stay in host memory count too."""
        return self._memory.used

    @property
    def info(self) -> TierInfo:
        """The device and its driver."""
        device = self._runtime.device
        return TierInfo(
            name=TIER,
            device=device.name,
            driver=f"{device.platform}, {device.driver}",
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=OPCODES,
            memory_bytes=device.memory_bytes,
            host_unified=device.host_unified,
            asynchronous=True,
        )

    @property
    def allocated_bytes(self) -> int:
        """Memory taken from the device. Where it is the host's, the sources of arranged weights
        that are no view of the model file count too, and the snapshots of inputs."""
        if not self._memory.shared:
            return self._memory.held
        sources = (b.nbytes for b in self._buffers if b.source is not None and owns_upload(b.decl))
        return self._memory.held + sum(sources) + self._submissions.nbytes

    @property
    def available_bytes(self) -> int:
        """What is left of the device's memory; OpenCL does not say what others use of it."""
        return self._memory.available

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        return self._footprint(graph, largest, self._steps.memory(graph, largest))

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        return shape_buckets(largest)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Make the scratch memory, in a bank that has room for the buffers to come."""
        steps = self._steps.memory(graph, largest)
        planned = self._footprint(graph, largest, steps)
        # Before the program of steps is begun: a driver makes one at a time.
        self._arranger.prepare(
            dict.fromkeys(decl.dtype for decl in graph.buffers.values() if matrices_of(decl))
        )
        self._runtime.launcher.expect(steps.kinds)
        self._memory.expect(sum(planned.buffers.values()) + planned.scratch + planned.variants)
        self._reserve(steps.shared, steps.own)
        self._reserve_inputs(input_layout(graph, largest).nbytes)

    def alloc(self, decl: BufferDecl, nbytes: int) -> OpenClBuffer:
        """Zeroed memory. Raises OutOfMemory naming the buffer."""
        allocation = self._memory.allocate(decl.name, nbytes)
        sync_as(allocation, decl)
        return self._keep(OpenClBuffer(decl, nbytes, allocation))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> OpenClBuffer:
        """A view of ``data`` where the device reads host memory, else a copy.

        A matrix is arranged for the products as well. Raises OutOfMemory before copying.
        """
        buffer = OpenClBuffer(decl, data.nbytes, source=data)
        if matrices := matrices_of(decl):
            buffer.hold(self._arranger.upload(decl.name, decl.dtype, data, matrices))
        else:
            buffer.allocation = self._memory.adopt(decl.name, data, borrowed=True)
        return self._keep(buffer)

    def free(self, buffer: OpenClBuffer) -> None:
        """Release the memory, of which nothing submitted may still be running."""
        if not self._lost:
            self._arranger.finish()
        self._buffers.remove(buffer)
        for allocation in buffer.allocations:
            self._memory.free(allocation)

    def map(self, buffer: OpenClBuffer) -> NDArray[np.uint8]:
        """The bytes in host memory; a weight's are those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        assert buffer.allocation is not None
        return self._memory.map(buffer.allocation)

    def read(self, buffer: OpenClBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        assert buffer.allocation is not None
        return self._memory.read(buffer.allocation, offset, nbytes)

    def write(self, buffer: OpenClBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        assert buffer.allocation is not None
        self._memory.write(buffer.allocation, offset, data)

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, OpenClBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> OpenClBatch:
        """Packets of every op, bound to addresses. Raises UnsupportedOp and OutOfMemory."""
        runtime = self._runtime
        step, schedule = self._steps.of(graph, bucket)
        self._reserve(schedule.shared_bytes, schedule.own_bytes)
        self._reserve_inputs(inputs.nbytes)
        packets = bind_step(
            step,
            schedule,
            inputs,
            lambda name: self._stored(buffers[name]).address,
            lambda name: buffers[name].operand,
        )
        place = self._memory.adopt(f"packets of {graph.name}", packets.view(np.uint8))
        batch = OpenClBatch(
            bucket,
            len(packets),
            schedule.barriers,
            runtime.launcher.record(packets, place.address, step.ops),
            inputs.nbytes,
            outputs_of(graph, lambda name: self._stored(buffers[name])),
        )
        weakref.finalize(batch, self._memory.free, place)
        return batch

    def submit(
        self,
        batch: OpenClBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> OpenClFence:
        """Enqueue the step. Raises DeviceLost once the device has failed."""
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            return self._submissions.submit(batch, inputs, requested, rows)
        except self._cl.Error as error:
            raise self._fail(f"submitting a step failed: {error}") from None

    def wait(self, fence: OpenClFence, timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
            if not self._waiting.until_done(fence, seconds):
                raise self._fail(f"a step did not end within {seconds:g} s")
            status = fence.event.command_execution_status
        except self._cl.Error as error:
            raise self._fail(f"a step failed: {error}") from None
        if status < 0:
            raise self._fail(f"a step ended with error {status}")
        self._arranger.forget()
        try:
            self._runtime.launcher.check()
        except WorkersLost:
            raise self._fail("workers of a step waited for one another in vain") from None

    def close(self) -> None:
        """Wait for the device, then free all buffers."""
        if not self._lost:
            self._runtime.launch.queue.finish()
        self._submissions.close()
        for buffer in list(self._buffers):
            self.free(buffer)
        for allocation in filter(None, (self._scratch, self._own, self._submissions.place)):
            self._memory.free(allocation)
        self._scratch = self._own = self._submissions.place = None
        self._runtime.launcher.close()

    def _keep(self, buffer: OpenClBuffer) -> OpenClBuffer:
        self._buffers.add(buffer)
        return buffer

    def _fail(self, reason: str) -> DeviceLost:
        self._lost = f"{self._runtime.device.name}: {reason}"
        return DeviceLost(self._lost)

    def _stored(self, buffer: OpenClBuffer) -> Allocation:
        """The bytes of a buffer as the graph declares them."""
        if buffer.allocation is None:
            assert buffer.source is not None
            buffer.allocation = self._memory.adopt(buffer.name, buffer.source, borrowed=True)
        return buffer.allocation

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        runtime = self._runtime
        step = lower_graph(graph, bucket, runtime.parts, TIER)
        if runtime.mode is Mode.PERSISTENT:
            return step, schedule_workers(step, runtime.launcher.workers)
        if runtime.launcher.by_modules:
            from accel.packets.fused import fuse
            from accel.packets.repeated import repeat_small

            step = repeat_small(fuse(step))
        return step, schedule_launches(step)

    def _known_memory(self) -> KnownMemory | None:
        """What steps took when they were planned before."""
        cache, runtime = self._choices.cache, self._runtime
        if cache is None:
            return None
        launcher = runtime.launcher
        parameters = runtime.mode.value, launcher.by_modules, launcher.workers, runtime.parts
        return StepMemoryCache(cache, (TIER, *parameters)).of

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        workers = self._runtime.launcher.workers
        arranged = planes_bytes if self._runtime.launcher.by_modules else None
        return opencl_footprint(graph, largest, steps, workers, self._memory.shared, arranged)

    def _reserve(self, shared_bytes: int, own_bytes: int) -> None:
        """Grow the scratch memory; batches lowered before follow it."""
        place, workers = self._runtime.launch.scratch, self._runtime.launcher.workers
        self._scratch = self._grown("scratch", self._scratch, shared_bytes)
        place.move(self._scratch.address, place.own, place.own_bytes)
        self._own = self._grown("workers' scratch", self._own, own_bytes * workers)
        per_worker = self._own.nbytes // workers // OWN_ALIGNMENT * OWN_ALIGNMENT
        place.move(self._scratch.address, self._own.address, per_worker)

    def _reserve_inputs(self, nbytes: int) -> None:
        """Make the place of a step's inputs in a device's own memory at least this large."""
        if not self._memory.shared:
            place = self._submissions.place
            self._submissions.place = self._grown("inputs of a step", place, nbytes)

    def _grown(self, what: str, current: Allocation | None, nbytes: int) -> Allocation:
        return grown(self._memory, self._runtime.launch.queue.finish, what, current, nbytes)


if TYPE_CHECKING:
    _conforms: type[DeviceTier[OpenClBuffer, OpenClBatch, OpenClFence]] = OpenClTier
