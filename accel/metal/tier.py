"""The Metal tier: a graph becomes packets, a form's packets commands that are encoded once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from accel.metal.submissions import MetalForm, MetalStep, MetalSubmissions
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer
from accel.packets.build import BuildError
from accel.packets.footprint import StepMemory, shared_footprint
from accel.packets.fused import fuse
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.step import Schedule, Step
from accel.packets.submissions import FormBatch, StepFence
from accel.packets.tier import BoundStep, PacketTier, tier_info
from contract.errors import CodecError
from contract.footprint import Footprint
from contract.ir.nodes import BufferDecl, Graph
from contract.kernel import GpuTarget, KernelHeader, decode_text
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier

GRACE_SECONDS = 10.0
"""Longest that a lost device is waited for: macOS ends commands that hang by itself."""

MetalBatch = FormBatch[Allocation, MetalForm]
MetalFence = StepFence[Allocation, MetalForm, MetalStep]


@dataclass(frozen=True, slots=True)
class MetalKernel:
    """A kernel file whose code is a text this device's compiler took."""

    header: KernelHeader


class MetalTier(PacketTier[Allocation, MetalForm, MetalStep]):
    """See ``contract.tier.Tier``. ``device`` is part of the device's name.

    Raises TierUnavailable when there is no such device, it lacks something, or it cannot keep to
    the arithmetic. ``metal`` is the runtime, by default the one of this machine.
    """

    def __init__(
        self, device: str = "", choices: Choices | None = None, metal: ObjectiveC | None = None
    ) -> None:
        runtime = open_runtime(metal or load_metal(), device, choices or Choices())
        self._runtime = runtime
        self._arranger = Arranger(runtime.memory, runtime.program)
        found = runtime.queue.device
        info = tier_info(TIER, found.name, found.driver, runtime.memory.capacity, host_unified=True)
        super().__init__(info, runtime.memory, MetalSubmissions(runtime.memory, runtime.places))

    @property
    def device(self) -> Device:
        """The device it runs on."""
        return self._runtime.queue.device

    @property
    def traits(self) -> Traits:
        """What the device does itself, and integers where it does not."""
        return self._runtime.program.traits

    def load_kernel(self, blob: bytes) -> MetalKernel:
        """Have the device's compiler build a ``.zrt`` file of Metal text, whose kernel has the
        file's name. Raises CodecError."""
        header, text = decode_text(blob, GpuTarget.APPLE_METAL)
        program = self._runtime.program
        items = header.workgroup_size[0]
        try:
            with self._guarded(f"kernel {header.name}"):
                program.discard(program.build(header.name, text, header.name, items))
        except BuildError as error:
            raise CodecError(f"kernel {header.name}: {error}") from None
        return MetalKernel(header)

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
        launches = launches_of(self._runtime.program, ops, placements)

        def record() -> Recording:
            return Recording(queue, memory, bound.name, launches, address, bound.input_bytes)

        return MetalForm(record)

    def _discard(self, launch: MetalForm) -> None:
        for recording in launch.recordings:
            recording.close()

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        self._runtime.places.move(self._scratch_of(shared).address, 0)

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
        """What a lost device may still use after ``GRACE_SECONDS`` is left to it."""
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
