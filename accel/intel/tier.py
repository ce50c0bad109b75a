"""The tier of Intel's GPUs over Level Zero: a graph becomes packets, and a bucket's packets command
lists that are recorded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from accel.intel.api import TIER, LevelZero, LevelZeroError, load_level_zero
from accel.intel.device import Device, all_devices
from accel.intel.launcher import ENDED, Recording
from accel.intel.memory import Allocation, Memory
from accel.intel.queue import PATIENCE_SECONDS
from accel.intel.runtime import Choices, open_runtime
from accel.kernels.arrange import PlaneArranger
from accel.kernels.device_probe import MEBIBYTE, device_line
from accel.kernels.launches import MAX_GROUPS, PlannedLaunch
from accel.kernels.recorded_tier import RecordedTier
from accel.kernels.runtime import DeviceHooks
from accel.packets.arenas import ArenaKind
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import CopiedStep, CopyingSubmissions, Recordings, StepFence
from accel.packets.tier import tier_info
from contract.errors import DeviceLost


class IntelSubmissions(CopyingSubmissions[Allocation, Recording]):
    """See CopyingSubmissions."""

    def __init__(self, memory: Memory, addresses: StepAddresses) -> None:
        super().__init__(
            lambda nbytes: memory.allocate(
                "outputs of a step", nbytes, ArenaKind.HOST, zeroed=False
            )
        )
        self._memory = memory
        self._addresses = addresses

    def _execute(
        self, slot: Recording, copies: Sequence[tuple[Allocation, Allocation, int]]
    ) -> tuple[Recording, Callable[[], bool]]:
        # What the host wrote into mapped memory counts only if nothing was running.
        if not self._in_flight:
            for source, target in self._memory.mirrored(to_device=True):
                self._memory.copy(source, 0, target, 0, target.nbytes)
        slot.bind(self._addresses)
        mirrored = self._memory.mirrored(to_device=False)
        copied = [*copies, *((source, target, source.nbytes) for source, target in mirrored)]
        slot.execute([(source.address, target.address, n) for source, target, n in copied])
        return slot, partial(slot.events.reached, ENDED)


GRACE_SECONDS = 10.0
"""Longest wait for a lost device, whose driver may end what hangs."""

IntelFence = StepFence[Allocation, Recordings[Recording], CopiedStep[Allocation]]


class IntelTier(DeviceHooks, RecordedTier[Allocation, Recording, CopiedStep[Allocation]]):
    """See ``contract.tier.Tier``. ``device`` is the number of a GPU or part of its name. Raises
    TierUnavailable when there is no such device, it lacks something, or its arithmetic is not
    exact. ``zero`` is the library, by default that of this machine."""

    _memory: Memory

    def __init__(
        self, device: str = "", choices: Choices | None = None, zero: LevelZero | None = None
    ) -> None:
        runtime = open_runtime(zero or load_level_zero(), device, choices or Choices())
        self._runtime = runtime
        memory, program, found = runtime.memory, runtime.program, runtime.queue.device
        info = tier_info(TIER, found.name, found.driver, memory.capacity)
        max_groups = min(MAX_GROUPS, found.max_groups)
        allocate = partial(memory.allocate, zeroed=False)
        arranger = PlaneArranger(memory, runtime.launch, max_groups, allocate)
        submissions = IntelSubmissions(memory, runtime.addresses)
        super().__init__(
            info, memory, submissions, arranger, runtime.addresses, program.kernels, max_groups
        )

    def _recording(
        self, name: str, launches: list[PlannedLaunch[Any]], packets: int, input_bytes: int
    ) -> Recording:
        return Recording(self._memory, name, launches, packets, input_bytes)

    def _until_done(self, fence: IntelFence, seconds: float) -> bool:
        if fence.done:
            return True
        return fence.completion.handle.events.wait(ENDED, seconds) and fence.done

    def _shut_down(self) -> None:
        """Memory that a lost device may still use after ``GRACE_SECONDS`` is not freed."""
        queue, ended = self._runtime.queue, False
        with suppress(DeviceLost, LevelZeroError):
            ended = queue.drained(GRACE_SECONDS if self._lost else PATIENCE_SECONDS)
        self._submissions.close()
        if ended:
            self._discard_recorded()
            self._runtime.close()


def device_lines(zero: LevelZero | None = None) -> tuple[str, ...]:
    """A line for every GPU: driver, memory, and what it lacks or which kernels it runs. Raises
    TierUnavailable if there is no loader or no GPU."""
    zero = zero or load_level_zero()
    devices = all_devices(zero)
    return tuple(_line(zero, number, device) for number, device in enumerate(devices))


def _line(zero: LevelZero, number: int, device: Device) -> str:
    shared = " shared" if device.integrated else ""
    memory = f"{device.memory_bytes // MEBIBYTE:,} MiB{shared}"
    about = f"{number}: {device.name}: {device.driver}, {memory}"
    return device_line(about, device.missing, lambda: IntelTier(str(number), Choices(), zero))
