"""The Metal tier: a graph becomes packets, a form's packets commands that are encoded once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import Traits
from accel.metal.arrange import Arranger
from accel.metal.device import Device
from accel.metal.launcher import Recording, launches_of
from accel.metal.memory import VIEW_BYTES, Allocation
from accel.metal.objc import TIER, ObjectiveC, load_metal
from accel.metal.runtime import Choices, open_runtime
from accel.metal.submissions import MetalBatch, MetalFence, Submissions
from accel.packets.binding import bind_step
from accel.packets.buffers import DeviceBuffer, matrices_of, outputs_of
from accel.packets.footprint import PlannedSteps, shared_footprint
from accel.packets.fused import fuse
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS
from accel.packets.rules import OPCODES, ROW_PARTS, lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.shape_buckets import shape_buckets
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import grown
from contract.arithmetic import ARITHMETIC_VERSION
from contract.context_manager import ContextManager
from contract.errors import DeviceLost
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, InputRows
from contract.ir.nodes import BufferDecl, Graph
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, TierInfo, check_range

GRACE_SECONDS = 10.0
"""Longest that a lost device is waited for: macOS ends commands that hang by itself."""

MetalBuffer = DeviceBuffer[Allocation]


class MetalTier(ContextManager):
    """See ``contract.tier.Tier``. ``device`` is part of the device's name.

    Raises TierUnavailable when there is no such device, it lacks something, or it cannot keep to
    the arithmetic. ``metal`` is the runtime, by default the one of this machine.
    """

    def __init__(
        self, device: str = "", choices: Choices | None = None, metal: ObjectiveC | None = None
    ) -> None:
        runtime = open_runtime(metal or load_metal(), device, choices or Choices())
        self._runtime = runtime
        self._memory = runtime.memory
        self._arranger = Arranger(runtime.memory, runtime.program)
        self._submissions = Submissions(runtime.memory, runtime.places)
        self._buffers: set[MetalBuffer] = set()
        self._batches: dict[int, list[Recording]] = {}
        self._scratch: Allocation | None = None
        self._steps = PlannedSteps(self._schedule)
        self._lost = ""
        self._closed = False

    @property
    def device(self) -> Device:
        """The device it runs on."""
        return self._runtime.queue.device

    @property
    def traits(self) -> Traits:
        """What the device does itself, and integers where it does not."""
        return self._runtime.program.traits

    @property
    def info(self) -> TierInfo:
        """The device and its driver."""
        device = self.device
        return TierInfo(
            name=TIER,
            device=device.name,
            driver=device.driver,
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=OPCODES,
            memory_bytes=self._memory.capacity,
            host_unified=True,
            asynchronous=True,
        )

    @property
    def allocated_bytes(self) -> int:
        """Memory taken from the device."""
        return self._memory.held

    @property
    def available_bytes(self) -> int:
        """What is left of the memory macOS recommends to use."""
        return self._memory.available

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        return shared_footprint(graph, largest, self._steps.memory(graph, largest), VIEW_BYTES)

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        return shape_buckets(largest)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Make the scratch memory, in an arena that has room for the buffers to come."""
        planned = self.footprint(graph, largest)
        self._memory.expect(sum(planned.buffers.values()) + planned.scratch + planned.variants)
        with self._guarded("scratch"):
            self._reserve(self._steps.memory(graph, largest).shared)

    def alloc(self, decl: BufferDecl, nbytes: int) -> MetalBuffer:
        """Zeroed memory. Raises OutOfMemory naming the buffer."""
        with self._guarded(decl.name):
            allocation = self._memory.allocate(decl.name, nbytes)
        return self._keep(MetalBuffer(decl, nbytes, allocation))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> MetalBuffer:
        """A matrix is arranged for the products; of the rest of a mapped file large tensors are
        read where they are. Raises OutOfMemory naming the buffer."""
        buffer = MetalBuffer(decl, data.nbytes, source=data)
        with self._guarded(decl.name):
            if matrices := matrices_of(decl):
                buffer.hold(self._arranger.upload(decl.name, decl.dtype, data, matrices))
            else:
                buffer.allocation = self._memory.adopt(decl.name, data)
        return self._keep(buffer)

    def free(self, buffer: MetalBuffer) -> None:
        """Release the memory, of which nothing submitted may still be running."""
        self._buffers.remove(buffer)
        if self._lost or self._closed:
            return
        with self._guarded(buffer.name):
            for allocation in buffer.allocations:
                self._memory.free(allocation)

    def map(self, buffer: MetalBuffer) -> NDArray[np.uint8]:
        """The bytes; a weight's are those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        assert buffer.allocation is not None
        return buffer.allocation.host

    def read(self, buffer: MetalBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        with self._guarded(buffer.name):
            self._runtime.queue.finish()
            return self._stored(buffer).host[offset : offset + nbytes].copy()

    def write(self, buffer: MetalBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        with self._guarded(buffer.name):
            self._runtime.queue.finish()
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            self._stored(buffer).host[offset : offset + flat.nbytes] = flat

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, MetalBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> MetalBatch:
        """Packets of every op, bound to addresses. Raises UnsupportedOp and OutOfMemory."""
        step, schedule = self._steps.of(graph, bucket)
        with self._guarded(f"packets of {graph.name}"):
            self._reserve(schedule.shared_bytes)
            packets = bind_step(
                step,
                schedule,
                inputs,
                lambda name: self._stored(buffers[name]).address,
                lambda name: buffers[name].operand,
            ).view(np.uint8)
            launches = launches_of(self._runtime.program, step.ops, schedule.placements)
            outputs = outputs_of(graph, lambda name: self._stored(buffers[name]))
            place = self._memory.adopt(f"packets of {graph.name}", packets)

        def record() -> Recording:
            queue, memory = self._runtime.queue, self._memory
            return Recording(queue, memory, graph.name, launches, place.address, inputs.nbytes)

        batch = MetalBatch(bucket, len(launches), schedule.barriers, record, outputs)
        self._batches[id(batch)] = batch.recordings
        weakref.finalize(batch, self._forget, id(batch), place)
        return batch

    def submit(
        self,
        batch: MetalBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> MetalFence:
        """Start the step. Raises DeviceLost once the device has failed."""
        with self._guarded("a step"):
            return self._submissions.submit(batch, inputs, requested, rows)

    def wait(self, fence: MetalFence, timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            if not fence.done and not self._runtime.queue.wait(fence.submission, seconds):
                raise DeviceLost(f"{self.device.name}: a step did not end within {seconds:g} s")
            assert fence.done

    def close(self) -> None:
        """Wait for the device unless it is lost, then free all. What a lost device may still use
        after ``GRACE_SECONDS`` is left to it."""
        if self._closed:
            return
        self._closed = True
        self._buffers.clear()
        queue = self._runtime.queue
        try:
            if not self._lost:
                queue.finish()
        finally:
            self._submissions.close()
            if queue.drain(GRACE_SECONDS):
                for recordings in self._batches.values():
                    for recording in recordings:
                        recording.close()
                self._runtime.close()
            self._batches.clear()

    def _keep(self, buffer: MetalBuffer) -> MetalBuffer:
        self._buffers.add(buffer)
        return buffer

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Errors of the library become the contract's; a device once lost stays so."""
        if self._lost:
            raise DeviceLost(self._lost)
        memory = self._memory
        try:
            with self._runtime.queue.guarded(what, lambda: (memory.held, memory.available)):
                yield
        except DeviceLost as error:
            self._lost = str(error)
            raise

    def _stored(self, buffer: MetalBuffer) -> Allocation:
        """The bytes of a buffer as the graph declares them."""
        if buffer.allocation is None:
            assert buffer.source is not None
            buffer.allocation = self._memory.adopt(buffer.name, buffer.source)
        return buffer.allocation

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        step = fuse(lower_graph(graph, bucket, ROW_PARTS, TIER))
        return step, schedule_levels(step)

    def _reserve(self, nbytes: int) -> None:
        """Grow scratch; recordings made before follow it."""
        finish = self._runtime.queue.finish
        self._scratch = grown(self._memory, finish, "scratch", self._scratch, nbytes)
        self._runtime.places.move(self._scratch.address, 0)

    def _forget(self, key: int, packets: Allocation) -> None:
        """A batch is gone, of which nothing runs any more."""
        if self._closed or self._lost:
            return
        for recording in self._batches.pop(key):
            recording.close()
        self._memory.free(packets)


if TYPE_CHECKING:
    _conforms: type[DeviceTier[MetalBuffer, MetalBatch, MetalFence]] = MetalTier
