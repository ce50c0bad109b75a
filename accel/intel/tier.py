"""The tier of Intel's GPUs over Level Zero: a graph becomes packets, and a bucket's packets command
lists that are recorded once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.intel.api import TIER, LevelZero, LevelZeroError, load_level_zero
from accel.intel.device import Device
from accel.intel.launcher import ENDED, Recording, launch_alone
from accel.intel.memory import Allocation, Memory
from accel.intel.program import Program
from accel.intel.queue import PATIENCE_SECONDS
from accel.intel.runtime import Choices, open_runtime
from accel.intel.submissions import IntelForm, IntelStep, IntelSubmissions
from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import MOST_GROUPS, launches_of
from accel.kernels.source import Module, Traits
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer
from accel.packets.fused import fuse
from accel.packets.packet_tier import BoundStep, PacketTier
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.staging_buffers import sync_as
from accel.packets.step import Schedule, Step
from accel.packets.submissions import FormBatch, StepFence
from accel.packets.tier import tier_info
from contract.errors import DeviceLost
from contract.ir.nodes import BufferDecl, Graph
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier

GRACE_SECONDS = 10.0
"""Longest wait for a lost device, whose driver may end what hangs."""

IntelBatch = FormBatch[Allocation, IntelForm]
IntelFence = StepFence[Allocation, IntelForm, IntelStep]


class IntelTier(PacketTier[Allocation, IntelForm, IntelStep]):
    """See ``contract.tier.Tier``. ``device`` is the number of a GPU or part of its name.

    Raises TierUnavailable when there is no such device, it lacks something, or its arithmetic is
    not exact. ``zero`` is the library, by default that of this machine.
    """

    _memory: Memory

    def __init__(
        self, device: str = "", choices: Choices | None = None, zero: LevelZero | None = None
    ) -> None:
        runtime = open_runtime(zero or load_level_zero(), device, choices or Choices())
        self._runtime = runtime
        self._arranger = Arranger(runtime.memory, runtime.program)
        found = runtime.queue.device
        info = tier_info(TIER, found.name, found.driver, runtime.memory.capacity)
        submissions = IntelSubmissions(runtime.memory, runtime.addresses)
        super().__init__(info, runtime.memory, submissions)

    @property
    def device(self) -> Device:
        """The open device."""
        return self._runtime.queue.device

    @property
    def traits(self) -> Traits:
        """The operations that the device computes exactly itself; integers compute the others."""
        return self._runtime.program.traits

    @property
    def used_bytes(self) -> int:
        """Device memory in use."""
        return self._memory.used

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        step = fuse(lower_graph(graph, bucket, ROW_PARTS, TIER))
        return step, schedule_levels(step)

    def _allocate(self, decl: BufferDecl, nbytes: int) -> Allocation:
        allocation = super()._allocate(decl, nbytes)
        sync_as(allocation, decl)
        return allocation

    def _arrange(
        self, decl: BufferDecl, data: NDArray[np.uint8], matrices: int
    ) -> ArrangedMatrix[Allocation]:
        return self._arranger.upload(decl.name, decl.dtype, data, matrices)

    def _record(self, bound: BoundStep[Allocation]) -> IntelForm:
        memory, address = self._runtime.memory, bound.stored.address
        launches = launches_of(
            self._runtime.program.kernels,
            bound.step.ops,
            bound.schedule.placements,
            most_groups(self.device),
        )

        def record() -> Recording:
            return Recording(memory, bound.name, launches, address, bound.input_bytes)

        return IntelForm(record)

    def _discard(self, launch: IntelForm) -> None:
        for recording in launch.made:
            recording.close()

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        self._runtime.addresses.move(self._scratch_of(shared).address, 0)

    def _finish(self) -> None:
        self._runtime.queue.finish()

    def _until_done(self, fence: IntelFence, seconds: float) -> bool:
        if fence.done:
            return True
        return fence.completion.recording.events.wait(ENDED, seconds) and fence.done

    def _translated(self, what: str) -> AbstractContextManager[None]:
        memory = self._memory
        return self._runtime.queue.guarded(what, lambda: (memory.held, memory.available))

    def _shut_down(self) -> None:
        """What a lost device may still use after ``GRACE_SECONDS`` is not freed."""
        queue, ended = self._runtime.queue, False
        with suppress(DeviceLost, LevelZeroError):
            ended = queue.drained(GRACE_SECONDS if self._lost else PATIENCE_SECONDS)
        self._submissions.close()
        if ended:
            self._discard_recorded()
            self._runtime.close()


if TYPE_CHECKING:
    _conforms: type[DeviceTier[DeviceBuffer[Allocation], IntelBatch, IntelFence]] = IntelTier


def most_groups(device: Device) -> int:
    """Most work-groups of a launch; each takes several units of work in turn."""
    return min(MOST_GROUPS, device.most_groups)


class Arranger(PlaneArranger[Allocation]):
    """Arranges matrices on one device."""

    def __init__(self, memory: Memory, program: Program) -> None:
        super().__init__(memory, most_groups(memory.queue.device))
        self._device_memory = memory
        self._program = program

    def _target(self, name: str, nbytes: int) -> Allocation:
        return self._device_memory.allocate(name, nbytes, zeroed=False)

    def _launch(
        self, module: Module, operands: Sequence[int], sizes: Sequence[int], groups: int
    ) -> None:
        kernel = self._program.kernel(module)
        launch_alone(self._device_memory, kernel, module.op, operands, sizes, groups)
