"""The Metal tier: a graph becomes packets, and a bucket's packets commands that are encoded
once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import MOST_GROUPS, launches_of
from accel.kernels.source import Module, Traits
from accel.metal.device import Device
from accel.metal.launcher import Recording, launch_alone
from accel.metal.memory import VIEW_BYTES, Allocation, Memory
from accel.metal.objc import TIER, ObjectiveC, load_metal
from accel.metal.program import Program
from accel.metal.runtime import Choices, open_runtime
from accel.metal.submissions import MetalForm, MetalStep, MetalSubmissions
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer
from accel.packets.footprint import StepMemory, shared_footprint
from accel.packets.fused import fuse
from accel.packets.packet_tier import BoundStep, PacketTier
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.step import Schedule, Step
from accel.packets.submissions import FormBatch, StepFence
from accel.packets.tier import tier_info
from contract.footprint import Footprint
from contract.ir.nodes import BufferDecl, Graph
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier

GRACE_SECONDS = 10.0
"""Longest wait for a lost device: macOS ends hanging commands by itself."""

MetalBatch = FormBatch[Allocation, MetalForm]
MetalFence = StepFence[Allocation, MetalForm, MetalStep]


class MetalTier(PacketTier[Allocation, MetalForm, MetalStep]):
    """See ``contract.tier.Tier``. ``device`` is part of the device's name.

    Raises TierUnavailable when there is no such device, it lacks something, or its arithmetic is
    not exact. ``metal`` is the runtime, by default that of this machine.
    """

    def __init__(
        self, device: str = "", choices: Choices | None = None, metal: ObjectiveC | None = None
    ) -> None:
        runtime = open_runtime(metal or load_metal(), device, choices or Choices())
        self._runtime = runtime
        self._arranger = Arranger(runtime.memory, runtime.program)
        found = runtime.queue.device
        info = tier_info(TIER, found.name, found.driver, runtime.memory.capacity, host_unified=True)
        super().__init__(info, runtime.memory, MetalSubmissions(runtime.memory, runtime.addresses))

    @property
    def device(self) -> Device:
        """The open device."""
        return self._runtime.queue.device

    @property
    def traits(self) -> Traits:
        """The operations that the device computes exactly itself; integers compute the others."""
        return self._runtime.program.traits

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        step = fuse(lower_graph(graph, bucket, ROW_PARTS, TIER))
        return step, schedule_levels(step)

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        return shared_footprint(graph, largest, steps, VIEW_BYTES)

    def _arrange(
        self, decl: BufferDecl, data: NDArray[np.uint8], matrices: int
    ) -> ArrangedMatrix[Allocation]:
        return self._arranger.upload(decl.name, decl.dtype, data, matrices)

    def _record(self, bound: BoundStep[Allocation]) -> MetalForm:
        queue, memory, address = self._runtime.queue, self._runtime.memory, bound.stored.address
        ops, placements = bound.step.ops, bound.schedule.placements
        launches = launches_of(self._runtime.program.pipelines, ops, placements)

        def record() -> Recording:
            return Recording(queue, memory, bound.name, launches, address, bound.input_bytes)

        return MetalForm(record)

    def _discard(self, launch: MetalForm) -> None:
        for recording in launch.made:
            recording.close()

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        self._runtime.addresses.move(self._scratch_of(shared).address, 0)

    def _finish(self) -> None:
        self._runtime.queue.finish()

    def _until_done(
        self, fence: StepFence[Allocation, MetalForm, MetalStep], seconds: float
    ) -> bool:
        step = fence.completion
        return fence.done or (self._runtime.queue.wait(step.submission, seconds) and fence.done)

    def _translated(self, what: str) -> AbstractContextManager[None]:
        memory = self._memory
        return self._runtime.queue.guarded(what, lambda: (memory.held, memory.available))

    def _shut_down(self) -> None:
        """Memory that a lost device may still use after ``GRACE_SECONDS`` is not freed."""
        queue = self._runtime.queue
        try:
            if not self._lost:
                queue.finish()
        finally:
            self._submissions.close()
            if queue.drain(GRACE_SECONDS):
                self._discard_recorded()
                self._runtime.close()


if TYPE_CHECKING:
    _conforms: type[DeviceTier[DeviceBuffer[Allocation], MetalBatch, MetalFence]] = MetalTier


class Arranger(PlaneArranger[Allocation]):
    """Arranges matrices on one device; stored bytes are a view of the file where there is one."""

    def __init__(self, memory: Memory, program: Program) -> None:
        super().__init__(memory, MOST_GROUPS)
        self._device_memory = memory
        self._program = program

    def _launch(
        self, module: Module, operands: Sequence[int], sizes: Sequence[int], groups: int
    ) -> None:
        pipeline = self._program.pipeline(module)
        launch_alone(self._device_memory, pipeline, module.op, operands, sizes, groups)
