"""What device tiers of packets share: buffers, lowering, steps, errors and the end.

A tier opens its device, then gives this base its memory, its submissions and the methods marked
as hooks. Nothing here knows a driver.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from accel.packets.binding import bind_step
from accel.packets.buffers import Allocation, ArrangedMatrix, DeviceBuffer, matrices_of, outputs_of
from accel.packets.footprint import KnownMemory, PlannedSteps, StepMemory, device_footprint
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS, CompletionWaiter
from accel.packets.layouts import planes_bytes
from accel.packets.rules import OPCODES
from accel.packets.shape_buckets import shape_buckets
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import grown
from accel.packets.submissions import Completion, FormBatch, StepFence, Submissions
from contract.arithmetic import ARITHMETIC_VERSION
from contract.context_manager import ContextManager
from contract.errors import DeviceLost
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, InputRows, input_layout
from contract.ir.nodes import BufferDecl, Graph
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.tier import PROMPT_TOKENS, Heap, TierInfo, check_range

Bytes = NDArray[np.uint8]
A = TypeVar("A", bound=Allocation)
L = TypeVar("L")
C = TypeVar("C", bound=Completion)


class DeviceMemory(Protocol[A]):
    """The memory of one device. Sizes in bytes."""

    @property
    def held(self) -> int:
        """Bytes taken from the device, those included that nothing uses yet."""

    @property
    def available(self) -> int:
        """Bytes that can still be taken."""

    def expect(self, nbytes: int, /) -> None:
        """Allocations of so many bytes in all, aligned, are about to follow."""

    def allocate(self, what: str, nbytes: int, /) -> A:
        """Zeroed memory. Raises OutOfMemory naming ``what``."""

    def adopt(self, what: str, data: Bytes, /) -> A:
        """Memory that holds ``data``. Raises OutOfMemory naming ``what``."""

    def free(self, allocation: A, /) -> None:
        """Take memory back that nothing submitted uses."""

    def map(self, allocation: A, /) -> Bytes:
        """See ``contract.tier.Tier.map``."""

    def read(self, allocation: A, offset: int, nbytes: int, /) -> Bytes:
        """A copy of some of the bytes."""

    def write(self, allocation: A, offset: int, data: Bytes, /) -> None:
        """Replace some of the bytes."""


@dataclass(frozen=True, slots=True)
class BoundStep(Generic[A]):
    """A form with addresses. ``packets`` is PACKET[ops], which ``stored`` holds on the device;
    ``input_bytes`` is the size of a step's inputs."""

    name: str
    step: Step
    schedule: Schedule
    packets: NDArray[np.void]
    stored: A
    input_bytes: int


def tier_info(
    name: str,
    device: str,
    driver: str,
    memory_bytes: int,
    host_unified: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
) -> TierInfo:
    """Identity of a tier of packets."""
    return TierInfo(
        name=name,
        device=device,
        driver=driver,
        arithmetic=f"exact-{ARITHMETIC_VERSION}",
        opcodes=OPCODES,
        memory_bytes=memory_bytes,
        host_unified=host_unified,
        asynchronous=True,
        prompt_tokens=prompt_tokens,
    )


class PacketTier(ContextManager, Generic[A, L, C]):
    """See ``contract.tier.Tier``. ``known`` may know what steps take without planning them.

    Hooks a tier must give: ``_schedule``, ``_arrange``, ``_record``, ``_reserve``, ``_finish``,
    ``_translated`` and ``_shut_down``. The others have defaults.
    """

    def __init__(
        self,
        info: TierInfo,
        memory: DeviceMemory[A],
        submissions: Submissions[A, L, Any, C],
        known: KnownMemory | None = None,
    ) -> None:
        self._info = info
        self._memory = memory
        self._submissions = submissions
        self._buffers: set[DeviceBuffer[A]] = set()
        self._recorded: dict[int, tuple[L, A]] = {}
        self._scratch: A | None = None
        self._steps = PlannedSteps(self._schedule, self.buckets, known)
        self._waiting = CompletionWaiter()
        self._lost = ""
        self._closed = False

    @property
    def info(self) -> TierInfo:
        """The device and its driver."""
        return self._info

    @property
    def allocated_bytes(self) -> int:
        """Memory taken from the device."""
        return self._memory.held

    @property
    def available_bytes(self) -> int:
        """Memory that can still be taken, as far as the device says."""
        with self._guarded("asking for free memory"):
            return self._memory.available

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        return shape_buckets(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """See ``contract.tier.Tier``."""
        return self._footprint(graph, largest, self._steps.memory(graph, largest))

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Make what steps share, where there is room for the buffers to come."""
        steps = self._steps.memory(graph, largest)
        planned = self._footprint(graph, largest, steps)
        self._memory.expect(sum(planned.buffers.values()) + planned.scratch + planned.variants)
        with self._guarded("scratch"):
            self._reserve(steps.shared, steps.own, input_layout(graph, largest).nbytes)

    def alloc(self, decl: BufferDecl, nbytes: int, heap: Heap) -> DeviceBuffer[A]:
        """Zeroed memory. Raises OutOfMemory naming the buffer."""
        with self._guarded(decl.name):
            allocation = self._allocate(decl, nbytes)
        return self._keep(DeviceBuffer(decl, nbytes, heap, allocation))

    def upload(self, decl: BufferDecl, data: Bytes) -> DeviceBuffer[A]:
        """Memory that holds ``data``, a matrix arranged for the products. Raises OutOfMemory
        naming the buffer."""
        buffer: DeviceBuffer[A] = DeviceBuffer(decl, data.nbytes, Heap.DEVICE_LOCAL, source=data)
        with self._guarded(decl.name):
            if matrices := matrices_of(decl):
                buffer.hold(self._arrange(decl, data, matrices))
            else:
                self._stored(buffer)
        return self._keep(buffer)

    def free(self, buffer: DeviceBuffer[A]) -> None:
        """Release the memory, of which nothing submitted may still be running."""
        self._buffers.remove(buffer)
        if self._lost:
            return
        with self._guarded(buffer.name):
            self._finish_uploads()
            for allocation in buffer.allocations:
                self._memory.free(allocation)

    def map(self, buffer: DeviceBuffer[A]) -> Bytes:
        """The bytes in host memory; a weight's are those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        with self._guarded(buffer.name):
            return self._memory.map(self._stored(buffer))

    def read(self, buffer: DeviceBuffer[A], offset: int, nbytes: int) -> Bytes:
        """See Tier."""
        check_range(buffer, offset, nbytes)
        with self._guarded(buffer.name):
            return self._memory.read(self._stored(buffer), offset, nbytes)

    def write(self, buffer: DeviceBuffer[A], offset: int, data: Bytes) -> None:
        """See Tier."""
        check_range(buffer, offset, data.nbytes)
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        with self._guarded(buffer.name):
            self._memory.write(self._stored(buffer), offset, flat)

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, DeviceBuffer[A]],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> FormBatch[A, L]:
        """Packets of every op, bound to addresses. Raises UnsupportedOp and OutOfMemory."""
        step, schedule = self._steps.of(graph, bucket)
        what = f"packets of {graph.name}"
        with self._guarded(what):
            self._reserve(schedule.shared_bytes, schedule.own_bytes, inputs.nbytes)
            packets = bind_step(
                step,
                schedule,
                inputs,
                lambda name: self._stored(buffers[name]).address,
                lambda name: buffers[name].operand,
            )
            outputs = outputs_of(graph, lambda name: self._stored(buffers[name]))
            stored = self._memory.adopt(what, packets.view(np.uint8))
            bound = BoundStep(graph.name, step, schedule, packets, stored, inputs.nbytes)
            try:
                launch = self._record(bound)
            except Exception as error:
                if not isinstance(error, DeviceLost):
                    self._memory.free(stored)
                raise
        barriers = schedule.barriers
        batch = FormBatch(bucket, len(packets), barriers, launch, inputs.nbytes, outputs)
        self._recorded[id(batch)] = launch, stored
        weakref.finalize(batch, self._forget, id(batch))
        return batch

    def submit(
        self,
        batch: FormBatch[A, L],
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> StepFence[A, L, C]:
        """Start the step. Raises DeviceLost once the device has failed."""
        with self._guarded("submitting a step"):
            return self._submissions.submit(batch, inputs, requested, rows)

    def wait(self, fence: StepFence[A, L, C], timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            if not self._until_done(fence, seconds):
                reason = f"{self._info.device}: a step did not end within {seconds:g} s"
                raise DeviceLost(reason)

    def close(self) -> None:
        """Wait for the device unless it is lost, then free all."""
        if self._closed:
            return
        self._closed = True
        try:
            self._shut_down()
        finally:
            self._buffers.clear()
            self._recorded.clear()

    @abstractmethod
    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        """Hook: the ops of a graph for one form, and when each runs. Raises UnsupportedOp."""

    @abstractmethod
    def _arrange(self, decl: BufferDecl, data: Bytes, matrices: int) -> ArrangedMatrix[A]:
        """Hook: ``data``, so many matrices one below the other, as the products read them."""

    @abstractmethod
    def _record(self, bound: BoundStep[A]) -> L:
        """Hook: what submits the step."""

    @abstractmethod
    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        """Hook: grow what steps share to bytes of scratch for all workers, for each one, and of
        inputs; batches lowered before follow. ``_scratch_of`` and ``_grown`` do the growing."""

    @abstractmethod
    def _finish(self) -> None:
        """Hook: return when nothing submitted runs any more. Raises DeviceLost."""

    @abstractmethod
    def _translated(self, what: str) -> AbstractContextManager[None]:
        """Hook: errors of the driver become the contract's; ``what`` was being done."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Hook: let what runs end, unless the device is lost, and give everything back."""

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        """Hook: the bytes of a graph; by default of a device with memory of its own."""
        return device_footprint(graph, largest, steps, planes_bytes)

    def _allocate(self, decl: BufferDecl, nbytes: int) -> A:
        """Hook: zeroed memory for a buffer of ``alloc``."""
        return self._memory.allocate(decl.name, nbytes)

    def _upload_stored(self, name: str, data: Bytes) -> A:
        """Hook: an upload as the graph declares it."""
        return self._memory.adopt(name, data)

    def _finish_uploads(self) -> None:
        """Hook: return when nothing reads or writes what was uploaded."""

    def _until_done(self, fence: StepFence[A, L, C], seconds: float) -> bool:
        """Hook: wait for a step; False when it has not ended within ``seconds``."""
        return self._waiting.until_done(fence, seconds)

    def _discard(self, launch: L) -> None:
        """Hook: free what ``_record`` made, of which nothing runs any more."""

    def _give_up(self) -> None:
        """Hook: the device has just been lost."""

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Errors of the driver become the contract's; a device once lost stays so."""
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            with self._translated(what):
                yield
        except DeviceLost as error:
            self._lost = str(error)
            self._give_up()
            raise

    def _keep(self, buffer: DeviceBuffer[A]) -> DeviceBuffer[A]:
        self._buffers.add(buffer)
        return buffer

    def _stored(self, buffer: DeviceBuffer[A]) -> A:
        """The bytes of a buffer as the graph declares them."""
        if buffer.allocation is None:
            assert buffer.source is not None
            buffer.allocation = self._upload_stored(buffer.name, buffer.source)
        return buffer.allocation

    def _scratch_of(self, nbytes: int) -> A:
        """Scratch memory for all workers, grown to ``nbytes``."""
        self._scratch = self._grown("scratch", self._scratch, nbytes)
        return self._scratch

    def _grown(self, what: str, current: A | None, nbytes: int) -> A:
        return grown(self._memory, self._finish, what, current, nbytes)

    def _forget(self, key: int) -> None:
        """A batch is gone, of which nothing runs any more."""
        if not (self._closed or self._lost):
            self._discard_one(*self._recorded.pop(key))

    def _discard_recorded(self) -> None:
        """Free what all batches recorded, of which nothing runs any more."""
        while self._recorded:
            self._discard_one(*self._recorded.popitem()[1])

    def _discard_one(self, launch: L, stored: A) -> None:
        self._discard(launch)
        self._memory.free(stored)
