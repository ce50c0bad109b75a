"""The Vulkan tier: a graph becomes packets, a form's packets one recorded command buffer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import Traits
from accel.packets.binding import bind_step
from accel.packets.buffers import DeviceBuffer, matrices_of, outputs_of
from accel.packets.few import FEW_FORMS, with_few_tokens
from accel.packets.footprint import PlannedSteps, device_footprint
from accel.packets.fused import fuse
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS
from accel.packets.layouts import planes_bytes
from accel.packets.planes import PLANES_FROM, TILED, with_planes
from accel.packets.repeated import repeat_small
from accel.packets.rules import OPCODES, lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.shape_buckets import SPLIT_TOKENS, shape_buckets
from accel.packets.staging_buffers import sync_as
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import grown
from accel.packets.wide import with_wide_tiles
from accel.vulkan.api import TIER, Vulkan, load_vulkan
from accel.vulkan.arrange import Arranger
from accel.vulkan.device import Device
from accel.vulkan.launcher import Recording, launches_of
from accel.vulkan.memory import Allocation
from accel.vulkan.pushed import Packets
from accel.vulkan.runtime import Choices, open_runtime
from accel.vulkan.submissions import Submissions, VulkanBatch, VulkanFence
from contract.arithmetic import ARITHMETIC_VERSION
from contract.context_manager import ContextManager
from contract.errors import DeviceLost
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, InputRows, input_layout
from contract.ir.nodes import BufferDecl, Graph
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, TierInfo, check_range

VulkanBuffer = DeviceBuffer[Allocation]

PROMPT_TOKENS = 512
"""Of a step: what its products were measured with."""
PARTS = 128
"""Parts of a context that are attended to side by side: so many tiles, or else spans of tiles."""


class VulkanTier(ContextManager):
    """See ``contract.tier.Tier``. ``device`` is part of a device's or driver's name.

    Raises TierUnavailable when there is no such device, it lacks something, or it cannot keep to
    the arithmetic. ``vulkan`` is the library, by default the one this machine has.
    """

    def __init__(
        self, device: str = "", choices: Choices | None = None, vulkan: Vulkan | None = None
    ) -> None:
        runtime = open_runtime(vulkan or load_vulkan(), device, choices or Choices())
        self._runtime = runtime
        self._memory = runtime.memory
        self._arranger = Arranger(runtime.queue, runtime.memory, runtime.program)
        self._submissions = Submissions(runtime.queue, runtime.memory)
        self._buffers: set[VulkanBuffer] = set()
        self._scratch: Allocation | None = None
        self._steps = PlannedSteps(self._schedule, self.buckets)
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
            driver=f"{device.driver}, Vulkan {device.version[0]}.{device.version[1]}",
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=OPCODES,
            memory_bytes=self._memory.capacity,
            host_unified=self._memory.shared,
            asynchronous=True,
            prompt_tokens=PROMPT_TOKENS,
        )

    @property
    def used_bytes(self) -> int:
        """Device memory in use."""
        return self._memory.used

    @property
    def allocated_bytes(self) -> int:
        """Memory taken from the device."""
        return self._memory.held

    @property
    def available_bytes(self) -> int:
        """What is left of the device's memory, as the driver says or by its size."""
        return self._memory.available

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        return device_footprint(graph, largest, self._steps.memory(graph, largest), planes_bytes)

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        if not self.traits.matrix:
            return shape_buckets(largest)
        tiled = (TILED,) if largest.tokens >= PLANES_FROM else ()
        return shape_buckets(largest, (1, SPLIT_TOKENS, *FEW_FORMS, *tiled))

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Make the scratch memory, in an arena that has room for the buffers to come."""
        planned = self.footprint(graph, largest)
        self._memory.expect(sum(planned.buffers.values()) + planned.scratch + planned.variants)
        with self._guarded("scratch"):
            shared = self._steps.memory(graph, largest).shared
            self._reserve(shared, input_layout(graph, largest).nbytes)

    def alloc(self, decl: BufferDecl, nbytes: int) -> VulkanBuffer:
        """Zeroed memory. Raises OutOfMemory naming the buffer."""
        with self._guarded(decl.name):
            allocation = self._memory.allocate(decl.name, nbytes)
        sync_as(allocation, decl)
        return self._keep(VulkanBuffer(decl, nbytes, allocation))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> VulkanBuffer:
        """A copy; a matrix is arranged for the products. Raises OutOfMemory naming the buffer."""
        buffer = VulkanBuffer(decl, data.nbytes, source=data)
        with self._guarded(decl.name):
            if matrices := matrices_of(decl):
                buffer.hold(self._arranger.upload(decl.name, decl.dtype, data, matrices))
            else:
                buffer.allocation = self._memory.adopt(decl.name, data)
        return self._keep(buffer)

    def free(self, buffer: VulkanBuffer) -> None:
        """Release the memory, of which nothing submitted may still be running."""
        self._buffers.remove(buffer)
        if self._lost:
            return
        for allocation in buffer.allocations:
            self._memory.free(allocation)

    def map(self, buffer: VulkanBuffer) -> NDArray[np.uint8]:
        """The bytes in host memory; a weight's are those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        assert buffer.allocation is not None
        with self._guarded(buffer.name):
            return self._memory.map(buffer.allocation)

    def read(self, buffer: VulkanBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        assert buffer.allocation is not None
        with self._guarded(buffer.name):
            return self._memory.read(buffer.allocation, offset, nbytes)

    def write(self, buffer: VulkanBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        assert buffer.allocation is not None
        with self._guarded(buffer.name):
            self._memory.write(buffer.allocation, offset, data)

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, VulkanBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> VulkanBatch:
        """Packets of every op, bound to addresses. Raises UnsupportedOp and OutOfMemory."""
        step, schedule = self._steps.of(graph, bucket)
        with self._guarded(f"packets of {graph.name}"):
            self._reserve(schedule.shared_bytes, inputs.nbytes)
            packets = bind_step(
                step,
                schedule,
                inputs,
                lambda name: self._stored(buffers[name]).address,
                lambda name: buffers[name].operand,
            )
            recording, place = self._recorded(step, schedule, packets, graph.name)
        batch = VulkanBatch(
            bucket,
            len(packets),
            schedule.barriers,
            recording,
            inputs.nbytes,
            outputs_of(graph, lambda name: self._stored(buffers[name])),
        )
        weakref.finalize(batch, _forget, recording, self._memory.free, place)
        return batch

    def submit(
        self,
        batch: VulkanBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> VulkanFence:
        """Start the step. Raises DeviceLost once the device has failed."""
        with self._guarded("a step"):
            return self._submissions.submit(batch, inputs, requested, rows)

    def wait(self, fence: VulkanFence, timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            if not self._runtime.queue.wait(fence.number, seconds):
                raise DeviceLost(f"{self.device.name}: a step did not end within {seconds:g} s")
            fence.collect()

    def close(self) -> None:
        """Wait for the device, then free all."""
        if self._closed:
            return
        self._closed = True
        self._buffers.clear()
        try:
            if not self._lost:
                self._runtime.queue.finish()
                self._submissions.close()
        finally:
            self._runtime.close(bool(self._lost))

    def _keep(self, buffer: VulkanBuffer) -> VulkanBuffer:
        self._buffers.add(buffer)
        return buffer

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Errors of the library become the contract's; a device once lost stays so."""
        if self._lost:
            raise DeviceLost(self._lost)
        memory = self._memory
        try:
            with self._runtime.queue.guarded(what, lambda: (memory.used, memory.available)):
                yield
        except DeviceLost as error:
            self._lost = str(error)
            raise

    def _stored(self, buffer: VulkanBuffer) -> Allocation:
        """The bytes of a buffer as the graph declares them."""
        if buffer.allocation is None:
            assert buffer.source is not None
            buffer.allocation = self._memory.adopt(buffer.name, buffer.source)
        return buffer.allocation

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        lowered = lower_graph(graph, bucket, PARTS, TIER)
        matrix = self.traits.matrix
        step = repeat_small(fuse(lowered, matrix, attention=matrix))
        step = with_few_tokens(with_wide_tiles(with_planes(step))) if matrix else step
        return step, schedule_levels(step)

    def _recorded(
        self, step: Step, schedule: Schedule, packets: NDArray[np.void], name: str
    ) -> tuple[Recording, Allocation]:
        runtime = self._runtime
        launches = launches_of(runtime.program, step.ops, schedule.placements)
        place = self._memory.adopt(f"packets of {name}", packets.view(np.uint8))
        recording = Recording(
            runtime.queue,
            runtime.program,
            runtime.places,
            launches,
            Packets(packets, place.address),
        )
        return recording, place

    def _reserve(self, scratch_bytes: int, input_bytes: int) -> None:
        """Grow scratch and the place of a step's inputs; batches lowered before follow them."""
        places = self._runtime.places
        self._scratch = self._grown("scratch", self._scratch, scratch_bytes)
        places.move(self._scratch.address, places.inputs)
        place = self._grown("inputs of a step", self._submissions.place, input_bytes)
        self._submissions.place = place
        places.move(self._scratch.address, place.address)

    def _grown(self, what: str, current: Allocation | None, nbytes: int) -> Allocation:
        return grown(self._memory, self._runtime.queue.finish, what, current, nbytes)


def _forget(recording: Recording, free: object, place: Allocation) -> None:
    recording.close()
    assert callable(free)
    free(place)


if TYPE_CHECKING:
    _conforms: type[DeviceTier[VulkanBuffer, VulkanBatch, VulkanFence]] = VulkanTier
