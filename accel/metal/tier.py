"""The Metal tier: a graph becomes packets, and a bucket's packets commands that are encoded
once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accel.kernels.arrange import PlaneArranger
from accel.kernels.device_probe import MEBIBYTE, device_line
from accel.kernels.launches import PlannedLaunch
from accel.kernels.recorded_tier import RecordedTier
from accel.kernels.runtime import DeviceHooks
from accel.metal.device import any_device
from accel.metal.launcher import Recording
from accel.metal.memory import VIEW_BYTES, Allocation, Memory
from accel.metal.objc import TIER, ObjectiveC, load_metal
from accel.metal.queue import Encode, Queue, Submission
from accel.metal.runtime import Choices, open_runtime
from accel.packets.arenas import ArenaKind
from accel.packets.footprint import StepMemory, shared_footprint
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import CopiedStep, CopyingSubmissions, Recordings, StepFence
from accel.packets.tier import tier_info
from contract.footprint import Footprint
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey

COPIED = 4
"""The number of bytes of a copy is a multiple of this."""


class MetalSubmissions(CopyingSubmissions[Allocation, Recording]):
    """See CopyingSubmissions."""

    def __init__(self, memory: Memory, addresses: StepAddresses) -> None:
        super().__init__(
            lambda nbytes: memory.allocate("outputs of a step", nbytes, ArenaKind.STEPS)
        )
        self._queue: Queue = memory.queue
        self._addresses = addresses

    def _execute(
        self, slot: Recording, copies: Sequence[tuple[Allocation, Allocation, int]]
    ) -> tuple[Submission, Callable[[], bool]]:
        slot.bind(self._addresses)
        encodes = [partial(slot.execute, number=n) for n in range(len(slot.runs))]
        encodes[-1] = partial(self._execute_and_copy, encodes[-1], copies)
        submission = self._queue.submit(encodes)
        return submission, partial(self._queue.reached, submission)

    def _execute_and_copy(
        self, execute: Encode, copies: Sequence[tuple[Allocation, Allocation, int]], buffer: Any
    ) -> None:
        execute(buffer)
        if not copies:
            return
        selector = "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"
        with self._queue.encoding(buffer, "blitCommandEncoder") as encoder:
            for source, target, nbytes in copies:
                self._queue.objc.send(
                    encoder,
                    selector,
                    *(source.arena.handle, source.offset),
                    *(target.arena.handle, target.offset),
                    -(-nbytes // COPIED) * COPIED,
                )


GRACE_SECONDS = 10.0
"""Longest wait for a lost device: macOS ends hanging commands by itself."""


class MetalTier(DeviceHooks, RecordedTier[Allocation, Recording, CopiedStep[Allocation]]):
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
        arranger = PlaneArranger(memory, runtime.launch)
        submissions = MetalSubmissions(memory, runtime.addresses)
        super().__init__(info, memory, submissions, arranger, runtime.addresses, program.kernels)

    def _footprint(self, graph: Graph, largest: ShapeKey, steps: StepMemory) -> Footprint:
        return shared_footprint(graph, largest, steps, VIEW_BYTES)

    def _recording(
        self, name: str, launches: list[PlannedLaunch[Any]], packets: int, input_bytes: int
    ) -> Recording:
        return Recording(self._memory, name, launches, packets, input_bytes)

    def _until_done(
        self,
        fence: StepFence[Allocation, Recordings[Recording], CopiedStep[Allocation]],
        seconds: float,
    ) -> bool:
        submission = fence.completion.handle
        return fence.done or (self._runtime.queue.wait(submission, seconds) and fence.done)

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


def device_lines(objc: ObjectiveC | None = None) -> tuple[str, ...]:
    """A line about the device: system, memory, and what it lacks or which kernels it runs. Raises
    TierUnavailable if there is no framework or no device."""
    objc = objc or load_metal()
    device = any_device(objc)
    objc.release(device.handle)
    about = f"{device.name}: {device.driver}, {device.memory_bytes // MEBIBYTE:,} MiB shared"
    return (device_line(about, device.missing, lambda: MetalTier(metal=objc)),)
