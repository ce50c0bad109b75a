"""The base of device tiers that lower a graph to packets with one schedule."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol

import numpy as np

from accel.packets.binding import bind_step
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer, outputs_of
from accel.packets.footprint import MemoryCache, PlannedSteps, StepMemory, device_footprint
from accel.packets.layouts import WeightLayout, matrices_of, planes_bytes
from accel.packets.packet import ALIGNMENT
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import WorkerScratch
from accel.packets.submissions import LoweredBatch, StepFence, Submissions
from accel.packets.tier import A, BaseTier, C, DeviceMemory, L
from contract.arrays import Bytes, Records
from contract.dtypes import DType
from contract.errors import DeviceLost
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, input_layout
from contract.ir.nodes import BufferDecl, Graph
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, TierInfo


def packets_of(graph: Graph) -> str:
    """The name of memory for packets in errors."""
    return f"packets of {graph.name}"


class ExpectingMemory(DeviceMemory[A], Protocol[A]):
    """Device memory that can reserve room ahead of allocations."""

    def expect(self, nbytes: int, /) -> None:
        """Reserve room for allocations of ``nbytes`` bytes in all, alignment included."""


class Arranger(Protocol[A]):
    """Arranges matrices in the layout of products."""

    def upload(self, name: str, dtype: DType, data: Bytes, matrices: int, /) -> ArrangedMatrix[A]:
        """Upload uint8[rows, row_bytes], ``matrices`` consecutive matrices. Raises OutOfMemory
        naming the buffer."""


@dataclass(frozen=True, slots=True)
class BoundStep(Generic[A]):
    """A lowered step with addresses. ``packets`` is PACKET[ops], ``stored`` its copy on the device,
    ``input_bytes`` the size of a step's inputs."""

    name: str
    step: Step
    schedule: Schedule
    packets: Records
    stored: A
    input_bytes: int


class PacketTier(BaseTier[A, L, C]):
    """See ``contract.tier.Tier``. ``memory_cache`` has the step memory of earlier starts.

    Hooks that a tier implements in addition to those of BaseTier: ``_arranger``, ``_schedule``,
    ``_record`` and ``_reserve``."""

    _memory: ExpectingMemory[A]
    _arranger: Arranger[A]
    _own: A | None = None

    def __init__(
        self,
        info: TierInfo,
        memory: ExpectingMemory[A],
        submissions: Submissions[A, L, Any, C],
        memory_cache: MemoryCache | None = None,
    ) -> None:
        super().__init__(info, memory, submissions)
        self._memory_cache = memory_cache
        self._recorded: dict[int, tuple[L, A]] = {}
        self._steps = PlannedSteps(self._schedule, self.buckets, memory_cache, self._store)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        return self._planned(graph, largest, self._steps.memory(graph, largest))

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        """Allocate what steps share, and announce the buffers that follow to the memory."""
        steps = self._steps.memory(graph, largest)
        planned = self._planned(graph, largest, steps)
        shared = planned.scratch + planned.variants + planned.ring
        self._memory.expect(sum(planned.buffers.values()) + shared)
        with self._guarded("scratch"):
            self._reserve(steps.shared, steps.own, input_layout(graph, largest).nbytes)

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, DeviceBuffer[A]],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> LoweredBatch[A, L]:
        """Packets of every op, bound to addresses. Raises UnsupportedOp and OutOfMemory."""
        step, schedule = self._steps.of(graph, bucket)
        with self._guarded(packets_of(graph)):
            self._reserve(schedule.shared_bytes, schedule.own_bytes, inputs.nbytes)
            packets = bind_step(
                step,
                schedule,
                inputs,
                lambda name: self._address(name, buffers),
                lambda name: self._operand(buffers[name]),
            )
            return self._batch(
                graph,
                buffers,
                bucket,
                inputs,
                packets,
                lambda stored: self._record(
                    BoundStep(graph.name, step, schedule, packets, stored, inputs.nbytes)
                ),
            )

    def _batch(
        self,
        graph: Graph,
        buffers: Mapping[str, DeviceBuffer[A]],
        bucket: ShapeKey,
        inputs: InputLayout,
        packets: Records,
        record: Callable[[A], L],
    ) -> LoweredBatch[A, L]:
        """The batch of bound packets; ``record`` is given their copy on the device."""
        outputs = outputs_of(graph, lambda name: self._stored(buffers[name]))
        stored = self._memory.adopt(packets_of(graph), packets.view(np.uint8))
        try:
            launch = record(stored)
        except Exception as error:
            if not isinstance(error, DeviceLost):
                self._memory.free(stored)
            raise
        batch = LoweredBatch(bucket, len(packets), launch, inputs.nbytes, outputs)
        self._recorded[id(batch)] = launch, stored
        weakref.finalize(batch, self._forget, id(batch))
        return batch

    def close(self) -> None:
        super().close()
        self._recorded.clear()
        # Its functions are methods of this tier: only the garbage collector would free the cycle.
        vars(self).pop("_steps", None)

    @abstractmethod
    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        """Hook: the step of a graph for one bucket, and its schedule. Raises UnsupportedOp."""

    def _store(
        self, graph: Graph, largest: ShapeKey, bucket: ShapeKey, lowered: tuple[Step, Schedule]
    ) -> bool:
        """Hook: whether the step was stored where ``lower`` finds it."""
        return False

    @abstractmethod
    def _record(self, bound: BoundStep[A]) -> L:
        """Hook: record the commands that execute the step."""

    @abstractmethod
    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        """Hook: grow what steps share to these bytes: scratch of all workers, scratch of each
        worker, inputs.

        Batches lowered before must use the new memory. ``_scratch_of`` and ``_grown`` grow
        memory."""

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        """Hook: the bytes a graph needs; by default those of a device with its own memory."""
        return device_footprint(graph, largest, steps, planes_bytes)

    def _planned(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        """Hook: ``_footprint``, adjusted for streamed weights."""
        return self._footprint(graph, largest, steps)

    def _address(self, name: str, buffers: Mapping[str, DeviceBuffer[A]]) -> int:
        """Hook: the address of buffer ``name`` in the layout that the graph declares."""
        return self._stored(buffers[name]).address

    def _operand(self, buffer: DeviceBuffer[A]) -> tuple[int, int, WeightLayout]:
        """Hook: the address, stride and layout of a matrix, as packets contain them."""
        return buffer.operand

    def _discard(self, launch: L) -> None:
        """Hook: free the result of ``_record``, which nothing submitted uses."""

    def _arrange(self, decl: BufferDecl, data: Bytes, matrices: int) -> ArrangedMatrix[A]:
        """Hook: upload a weight of ``matrices`` matrices in the layout of products."""
        return self._arranger.upload(decl.name, decl.dtype, data, matrices)

    def _reserve_workers(self, scratch: WorkerScratch, workers: int, shared: int, own: int) -> None:
        """``_reserve`` of scratch memory for workers that have ``own`` bytes each."""
        address = self._scratch_of(shared).address
        scratch.move(address, scratch.own, scratch.own_bytes)
        self._own = self._grown("workers' scratch", self._own, own * workers)
        each = self._own.nbytes // workers // ALIGNMENT * ALIGNMENT
        scratch.move(address, self._own.address, each)

    def _fill(self, buffer: DeviceBuffer[A]) -> None:
        if (matrices := matrices_of(buffer.decl)) and buffer.source is not None:
            buffer.hold(self._arrange(buffer.decl, buffer.source, matrices))
        else:
            self._stored(buffer)

    def _forget(self, key: int) -> None:
        """Called when a batch was garbage-collected; nothing submitted uses it."""
        if not (self._closed or self._lost):
            self._discard_one(*self._recorded.pop(key))

    def _discard_recorded(self) -> None:
        """Free what all batches recorded; nothing submitted uses it."""
        while self._recorded:
            self._discard_one(*self._recorded.popitem()[1])

    def _discard_one(self, launch: L, stored: A) -> None:
        self._discard(launch)
        self._memory.free(stored)


if TYPE_CHECKING:

    def _conforms(
        tier: PacketTier[A, L, C],
    ) -> DeviceTier[DeviceBuffer[A], LoweredBatch[A, L], StepFence[A, L, C]]:
        return tier
