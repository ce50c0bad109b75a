"""The OpenCL tier: graphs are lowered to packets, which kernels execute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from accel.opencl.arrange import Arranger
from accel.opencl.device import find_device, import_binding
from accel.opencl.driver import TIER
from accel.opencl.launcher import LaunchContext, Mode, Recording, WorkersLost
from accel.opencl.memory import BankedMemory, Memory
from accel.opencl.runtime import Choices, open_runtime
from accel.packets.build import Progress
from accel.packets.estimate_cache import StepMemoryCache
from accel.packets.footprint import MemoryCache, StepMemory, worker_footprint
from accel.packets.host_memory import AddressRange, aligned_bytes
from accel.packets.layouts import lanes_bytes, matrices_of, planes_bytes
from accel.packets.packet_tier import BoundStep
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches, schedule_workers
from accel.packets.step import Schedule, Step
from accel.packets.streaming_tier import StreamingTier
from accel.packets.submissions import HostSlot, LoweredBatch, StepFence, Submissions
from accel.packets.tier import tier_info
from contract.arrays import Bytes
from contract.errors import DeviceLost
from contract.footprint import Footprint, owns_upload
from contract.ir.inputs import InputCopy
from contract.ir.nodes import BufferDecl, Graph
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey

COPYING_ITEMS = 16
"""Work-items that copy an output; few, because a processor runs each on a core."""


@dataclass(frozen=True, slots=True)
class OpenClStep:
    """An enqueued step. ``event`` is the last of ``events``, those of its copies included.

    Events that are deleted wait for their commands. ``complete`` is the status at the end."""

    event: Any
    events: list[Any]
    complete: int

    def ended(self) -> bool:
        return bool(self.event.command_execution_status <= self.complete)

    def collect(self) -> None:
        """Do nothing: the device has copied the outputs (see Completion)."""


class OpenClSubmissions(Submissions[AddressRange, Recording, HostSlot, OpenClStep]):
    """See Submissions. ``input`` is the buffer for inputs on a device with its own memory."""

    def __init__(self, launch: LaunchContext) -> None:
        super().__init__()
        self._context = launch
        self._complete = launch.cl.COMPLETE
        shared = launch.memory.shared
        self._copy = launch.cl.Kernel(launch.program, "copy_output") if shared else None
        self.input: AddressRange | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in all snapshots."""
        held = sum(slot.inputs.data.nbytes for _, slot in self._in_flight)
        return held + sum(nbytes * len(free) for nbytes, free in self._free.items())

    def _new_slot(self, batch: LoweredBatch[AddressRange, Recording]) -> HostSlot:
        return HostSlot(InputCopy(aligned_bytes(batch.input_bytes)))

    def _launch(
        self,
        batch: LoweredBatch[AddressRange, Recording],
        slot: HostSlot,
        outputs: Mapping[str, Bytes],
    ) -> OpenClStep:
        memory, snapshot = self._context.memory, slot.inputs.data
        # Writes of the host to mapped memory count only when no step is in flight.
        sent = [] if self._in_flight else memory.to_device()
        inputs = self._provided(snapshot, sent)
        done = [batch.launch.enqueue(inputs, self._step.tokens)]
        for name, data in outputs.items():
            if data.nbytes:
                done.append(self._copied(batch.outputs[name][1], data))
        done += memory.to_host()
        self._context.queue.flush()
        return OpenClStep(done[-1], sent + done, self._complete)

    def _provided(self, snapshot: Bytes, sent: list[Any]) -> int:
        """The address from which the next step reads its inputs."""
        memory = self._context.memory
        if not isinstance(memory, BankedMemory):
            return int(snapshot.ctypes.data)
        assert self.input is not None
        sent.append(memory.transfer(self.input, snapshot, to_device=True))
        return self.input.address

    def _copied(self, allocation: AddressRange, data: Bytes) -> Any:
        """Enqueue the copy of an output; returns its event."""
        launch = self._context
        if isinstance(launch.memory, BankedMemory):
            return launch.memory.transfer(allocation, data, to_device=False)
        assert self._copy is not None
        addresses = np.uint64(allocation.address), np.uint64(data.ctypes.data)
        self._copy.set_args(*addresses, np.uint64(data.nbytes // 4))
        size = (COPYING_ITEMS,)
        return launch.cl.enqueue_nd_range_kernel(launch.queue, self._copy, size, None)


class OpenClTier(StreamingTier[AddressRange, Recording, OpenClStep]):
    """See ``contract.tier.Tier``. ``device`` is a part of a platform's or device's name. Raises
    TierUnavailable when there is no such device, and what ``open_runtime`` raises. ``progress`` is
    called with a line before the kernels are compiled."""

    _arranger: Arranger
    _memory: Memory
    _submissions: OpenClSubmissions

    def __init__(
        self, device: str = "", choices: Choices | None = None, progress: Progress | None = None
    ) -> None:
        self._cl = import_binding()
        self._choices = choices or Choices()
        self._runtime = open_runtime(find_device(device), self._choices, progress)
        self._arranger = Arranger(self._runtime, self._choices.cache, progress)
        found = self._runtime.device
        driver = f"{found.platform}, {found.driver}"
        choice = self._choices.shared_addresses
        unified = found.host_unified if choice is None else choice
        info = tier_info(TIER, found.name, driver, found.memory_bytes, unified)
        submissions = OpenClSubmissions(self._runtime.launch)
        super().__init__(info, self._runtime.memory, submissions, self._cache_of_memory())

    @property
    def mode(self) -> Mode:
        """The way packets are executed on this device."""
        return self._runtime.mode

    @property
    def shares_memory(self) -> bool:
        """Whether the device reads host memory, so that nothing is copied to it."""
        return self._memory.shared

    @property
    def streams(self) -> bool:
        return not self._memory.shared and not self.info.host_unified

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the device.

        On a device that shares host memory, snapshots of inputs count, and sources of arranged
        weights that are copies."""
        if not self._memory.shared:
            return self._memory.held
        sources = (b.nbytes for b in self._buffers if b.source is not None and owns_upload(b.decl))
        return self._memory.held + sum(sources) + self._submissions.nbytes

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Allocate scratch memory, in a bank with room for the buffers that follow."""
        steps = self._steps.memory(graph, largest)
        # A driver builds one program at a time, so this one comes before the program of steps.
        self._arranger.prepare(
            dict.fromkeys(decl.dtype for decl in graph.buffers.values() if matrices_of(decl))
        )
        self._runtime.launcher.expect(steps.kinds)
        super().reserve(graph, largest)

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        runtime = self._runtime
        step = lower_graph(graph, bucket, runtime.parts, TIER)
        if runtime.mode is Mode.PERSISTENT:
            copying, seen = self._copying(graph, step)
            return copying, schedule_workers(seen, runtime.launcher.workers)
        if runtime.launcher.by_modules:
            from accel.packets.fused import fuse
            from accel.packets.repeated import repeat_small

            step = repeat_small(fuse(step))
        copying, _ = self._copying(graph, step)
        return copying, schedule_launches(copying)

    def _streaming_scratch(self, nbytes: int) -> int:
        """A quarter more for a kernel whose workers meet at barriers: copies add barriers, so that
        fewer ops divide columns as the op before does or write over their operands."""
        return nbytes + nbytes // 4 if self._runtime.mode is Mode.PERSISTENT else nbytes

    def _cache_of_memory(self) -> MemoryCache | None:
        """The cache of step memory from earlier starts."""
        cache, runtime = self._choices.cache, self._runtime
        if cache is None:
            return None
        launcher = runtime.launcher
        parameters = runtime.mode.value, launcher.by_modules, launcher.workers, runtime.parts
        return StepMemoryCache(cache, (TIER, *parameters)).of

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        workers, shared = self._runtime.launcher.workers, self._memory.shared
        return worker_footprint(graph, largest, steps, workers, shared, self._arranged_bytes)

    def _arranged_bytes(self, decl: BufferDecl) -> int:
        return (planes_bytes if self._runtime.launcher.by_modules else lanes_bytes)(decl)

    def _on_host(self, purpose: str, nbytes: int) -> AddressRange:
        assert isinstance(self._memory, BankedMemory)
        return self._memory.allocate_on_host(f"{purpose} in host memory", nbytes)

    def _expect_on_host(self, nbytes: int) -> None:
        assert isinstance(self._memory, BankedMemory)
        self._memory.expect_on_host(nbytes)

    def _upload_stored(self, name: str, data: Bytes) -> AddressRange:
        return self._memory.adopt(name, data, borrowed=True)

    def _finish_uploads(self) -> None:
        self._arranger.finish()

    def _record(self, bound: BoundStep[AddressRange]) -> Recording:
        launcher = self._runtime.launcher
        return launcher.record(bound.packets, bound.stored.address, bound.step.ops)

    def _forget_inputs(self) -> AddressRange | None:
        inputs, self._submissions.input = self._submissions.input, None
        return inputs

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        runtime = self._runtime
        self._reserve_workers(runtime.launch.scratch, runtime.launcher.workers, shared, own)
        if not self._memory.shared:
            current = self._submissions.input
            self._submissions.input = self._grown("inputs of a step", current, inputs)

    def _finish(self) -> None:
        self._runtime.launch.queue.finish()

    def _until_done(
        self, fence: StepFence[AddressRange, Recording, OpenClStep], seconds: float
    ) -> bool:
        if not super()._until_done(fence, seconds):
            return False
        device = self._runtime.device.name
        status = fence.completion.event.command_execution_status
        if status < 0:
            raise DeviceLost(f"{device}: a step ended with error {status}")
        self._arranger.forget()
        try:
            self._runtime.launcher.check()
        except WorkersLost:
            reason = f"{device}: workers of a step waited for one another in vain"
            raise DeviceLost(reason) from None
        return True

    @contextmanager
    def _translated(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except self._cl.Error as error:
            reason = f"{self._runtime.device.name}: {purpose} failed: {error}"
            raise DeviceLost(reason) from None

    def _shut_down(self) -> None:
        if not self._lost:
            self._runtime.launch.queue.finish()
            self._arranger.finish()
        self._submissions.close()
        self._discard_recorded()
        shared = (self._scratch, self._own, self._submissions.input, self._ring_memory)
        buffers = (allocation for buffer in self._buffers for allocation in buffer.allocations)
        for allocation in (*buffers, *filter(None, shared)):
            self._memory.free(allocation)
        self._scratch = self._own = None
        self._runtime.launcher.close()
