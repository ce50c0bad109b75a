"""The Metal tier: a graph becomes packets, and a bucket's packets commands that are encoded
once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import PlannedLaunch
from accel.kernels.recorded_tier import RecordedTier
from accel.kernels.runtime import DeviceHooks
from accel.kernels.source import Module
from accel.metal.launcher import Recording, launch_packet
from accel.metal.memory import VIEW_BYTES, Allocation, Memory
from accel.metal.objc import TIER, ObjectiveC, load_metal
from accel.metal.runtime import Choices, open_runtime
from accel.metal.submissions import MetalRecordings, MetalStep, MetalSubmissions
from accel.packets.footprint import StepMemory, shared_footprint
from accel.packets.submissions import StepFence
from accel.packets.tier import tier_info
from contract.footprint import Footprint
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey

GRACE_SECONDS = 10.0
"""Longest wait for a lost device: macOS ends hanging commands by itself."""


class MetalTier(DeviceHooks, RecordedTier[Allocation, Recording, MetalStep]):
    """See ``contract.tier.Tier``. ``device`` is part of the device's name. Raises TierUnavailable
    when there is no such device, it lacks something, or its arithmetic is not exact. ``metal`` is
    the runtime, by default that of this machine."""

    _memory: Memory

    def __init__(
        self, device: str = "", choices: Choices | None = None, metal: ObjectiveC | None = None
    ) -> None:
        runtime = open_runtime(metal or load_metal(), device, choices or Choices())
        self._runtime = runtime
        memory, program, found = runtime.memory, runtime.program, runtime.queue.device
        info = tier_info(TIER, found.name, found.driver, memory.capacity, host_unified=True)

        def launch(module: Module, packet: NDArray[np.void], groups: int) -> None:
            launch_packet(memory, program.kernel(module), packet, groups)

        arranger = PlaneArranger(memory, launch)
        submissions = MetalSubmissions(memory, runtime.addresses)
        super().__init__(info, memory, submissions, arranger, runtime.addresses, program.kernels)

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        return shared_footprint(graph, largest, steps, VIEW_BYTES)

    def _recording(
        self, name: str, launches: list[PlannedLaunch[Any]], packets: int, input_bytes: int
    ) -> Recording:
        return Recording(self._memory, name, launches, packets, input_bytes)

    def _until_done(
        self, fence: StepFence[Allocation, MetalRecordings, MetalStep], seconds: float
    ) -> bool:
        step = fence.completion
        return fence.done or (self._runtime.queue.wait(step.submission, seconds) and fence.done)

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
