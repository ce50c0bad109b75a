"""Tiers T1 and T2: a graph becomes packets of the command processor, a step one write to its ring.

They differ in the driver that gives memory and queue, see ``kfd.py`` and ``userq.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.amd.arrange import arranged
from accel.amd.device import Allocation
from accel.amd.isa.checks import check_code
from accel.amd.kernel import Kernel, LinuxKernel
from accel.amd.launcher import Recording, launches_of
from accel.amd.program import LoadedKernel, checked
from accel.amd.runtime import Choices, open_runtime
from accel.amd.steps import buckets_of, for_matrices, step_of
from accel.amd.submissions import AmdBatch, AmdFence, Submissions
from accel.packets.binding import bind_step
from accel.packets.buffers import DeviceBuffer, matrices_of, outputs_of
from accel.packets.footprint import PlannedSteps, device_footprint
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS
from accel.packets.layouts import planes_bytes
from accel.packets.rules import OPCODES
from accel.packets.schedule import schedule_levels
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import grown
from contract.arithmetic import ARITHMETIC_VERSION
from contract.context_manager import ContextManager
from contract.errors import DeviceLost, TierError
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, InputRows
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.kernel import KernelHeader, decode_kernel
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, Heap, TierInfo, check_range

AmdBuffer = DeviceBuffer[Allocation]


@dataclass(frozen=True, slots=True)
class AmdKernel:
    """A kernel file whose code this GPU could run."""

    header: KernelHeader


class AmdTier(ContextManager):
    """See ``contract.tier.Tier``. ``device`` is part of a GPU's name; ``kernel`` is the system, or
    a simulated one; ``tier`` is t1 or t2.

    Raises TierUnavailable saying what is missing.
    """

    def __init__(
        self,
        device: str = "",
        choices: Choices | None = None,
        kernel: Kernel | None = None,
        tier: str = "t1",
    ) -> None:
        self._runtime = open_runtime(tier, kernel or LinuxKernel(), device, choices or Choices())
        self._device = self._runtime.device
        self._submissions = Submissions(self._runtime.queue, self._runtime.places)
        self._buffers: set[AmdBuffer] = set()
        self._batches: weakref.WeakSet[AmdBatch] = weakref.WeakSet()
        self._scratch: Allocation | None = None
        self._steps = PlannedSteps(self._schedule, buckets_of)
        self._lost = ""
        self._closed = False

    @property
    def info(self) -> TierInfo:
        """The GPU and its driver."""
        return TierInfo(
            name=self._device.tier,
            device=self._device.name,
            driver=self._device.driver.version,
            arithmetic=f"exact-{ARITHMETIC_VERSION}",
            opcodes=OPCODES,
            memory_bytes=self._device.capacity,
            host_unified=False,
            asynchronous=True,
        )

    @property
    def allocated_bytes(self) -> int:
        """Memory taken from the GPU."""
        return self._device.held

    @property
    def available_bytes(self) -> int:
        """What is left of it."""
        return self._device.available

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        return buckets_of(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        return device_footprint(graph, largest, self._steps.memory(graph, largest), planes_bytes)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Make the scratch memory."""
        with self._guarded("scratch"):
            self._reserve(self._steps.memory(graph, largest).shared)

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> AmdBuffer:
        """Zeroed memory: the GPU's own, but what the host reads after a step. Raises OutOfMemory
        naming the buffer."""
        with self._guarded(decl.name):
            place = self._device.allocate(decl.name, nbytes, decl.kind is not BufferKind.OUTPUT)
            place.host[:] = 0
        return self._keep(AmdBuffer(decl, nbytes, heap, place))

    def upload(self, decl: BufferDecl, data: NDArray[np.uint8]) -> AmdBuffer:
        """A copy; a matrix is arranged for the products. Raises OutOfMemory naming the buffer."""
        buffer = AmdBuffer(decl, data.nbytes, Heap.DEVICE_LOCAL, source=data)
        with self._guarded(decl.name):
            if matrices := matrices_of(decl):
                buffer.hold(arranged(self._runtime, decl.name, decl.dtype, data, matrices))
            else:
                self._stored(buffer)
        return self._keep(buffer)

    def free(self, buffer: AmdBuffer) -> None:
        """Release the memory, of which nothing submitted may still be running."""
        self._buffers.remove(buffer)
        if self._lost:
            return
        with self._guarded(buffer.name):
            for allocation in buffer.allocations:
                self._device.free(allocation)

    def map(self, buffer: AmdBuffer) -> NDArray[np.uint8]:
        """The bytes; a weight's are those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        assert buffer.allocation is not None
        return buffer.allocation.host

    def read(self, buffer: AmdBuffer, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        with self._guarded(buffer.name):
            self._submissions.finish(DEFAULT_TIMEOUT_SECONDS)
            return self._stored(buffer).host[offset : offset + nbytes].copy()

    def write(self, buffer: AmdBuffer, offset: int, data: NDArray[np.uint8]) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        with self._guarded(buffer.name):
            self._submissions.finish(DEFAULT_TIMEOUT_SECONDS)
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            self._stored(buffer).host[offset : offset + flat.nbytes] = flat

    def load_kernel(self, blob: bytes) -> AmdKernel:
        """Look whether this GPU could run a ``.zrt`` file. Raises CodecError."""
        header = checked(decode_kernel(blob), self._device.generation.target)
        check_code(header)
        with self._guarded(f"kernel {header.name}"):
            loaded: LoadedKernel = self._runtime.modules.load(header)
            self._device.free(loaded.place)
        return AmdKernel(header)

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, AmdBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> AmdBatch:
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
            launches = launches_of(self._runtime.modules, step.ops, schedule.placements)
            place = self._device.allocate(f"packets of {graph.name}", packets.nbytes)
            place.host[:] = packets

        def record() -> Recording:
            go = self._runtime.queue.go_address
            return Recording(self._device, graph.name, launches, place.address, inputs.nbytes, go)

        outputs = outputs_of(graph, lambda name: self._stored(buffers[name]))
        batch = AmdBatch(bucket, len(launches), schedule.barriers, record, outputs)
        weakref.finalize(batch, self._forget, place, batch.recordings)
        return batch

    def submit(
        self,
        batch: AmdBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> AmdFence:
        """Start the step. Raises DeviceLost once the device has failed."""
        with self._guarded("a step"):
            return self._submissions.submit(batch, inputs, requested, rows, DEFAULT_TIMEOUT_SECONDS)

    def wait(self, fence: AmdFence, timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            if not self._submissions.waiting.until_done(fence, seconds):
                raise DeviceLost(f"{self._device.name}: a step did not end within {seconds:g} s")

    def close(self) -> None:
        """End what runs, whatever of it was computed, then free all."""
        if self._closed:
            return
        self._closed = True
        try:
            # A device that is lost by now has nothing that anybody waits for.
            with suppress(DeviceLost):
                self._runtime.queue.cancel()
        finally:
            self._buffers.clear()
            try:
                self._runtime.close()
            except OSError as error:
                raise TierError(f"{self._device.name}: {error}") from None

    def _keep(self, buffer: AmdBuffer) -> AmdBuffer:
        self._buffers.add(buffer)
        return buffer

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Errors of the system become the contract's; a device once lost stays so: what it has not
        begun is left out, and its queue is taken from it."""
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            yield
        except DeviceLost as error:
            self._lost = str(error)
            with suppress(OSError, DeviceLost):
                self._runtime.queue.cancel()
            with suppress(OSError):
                self._runtime.queue.close()
            raise
        except OSError as error:
            raise TierError(f"{self._device.name}: {what}: {error}") from None

    def _stored(self, buffer: AmdBuffer) -> Allocation:
        """The bytes of a buffer as the graph declares them."""
        if buffer.allocation is None:
            assert buffer.source is not None
            place = self._device.allocate(buffer.name, buffer.source.nbytes)
            place.host[:] = np.ascontiguousarray(buffer.source).reshape(-1).view(np.uint8)
            buffer.allocation = place
        return buffer.allocation

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        with self._guarded("the self-test of products"):
            matrices = for_matrices(bucket) and self._runtime.multiplies()
        step = step_of(graph, bucket, self._device.tier, matrices)
        return step, schedule_levels(step)

    def _reserve(self, nbytes: int) -> None:
        """Grow scratch; recordings made before follow it."""

        def finish() -> None:
            self._submissions.finish(DEFAULT_TIMEOUT_SECONDS)

        self._scratch = grown(self._device, finish, "scratch", self._scratch, nbytes)
        self._runtime.places.move(self._scratch.address, 0)

    def _forget(self, packets: Allocation, recordings: Sequence[Recording]) -> None:
        """A batch is gone, of which nothing runs any more."""
        if self._closed or self._lost:
            return
        for place in (packets, *(recording.place for recording in recordings)):
            self._device.free(place)


if TYPE_CHECKING:
    _conforms: type[DeviceTier[AmdBuffer, AmdBatch, AmdFence]] = AmdTier
