"""Tiers T1 and T2: a graph becomes packets of the command processor, and a step is one write to its
ring.

They differ in the driver that provides memory and queue, see ``kfd.py`` and ``userq.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from accel.amd.device import Allocation
from accel.amd.kernel import Kernel
from accel.amd.launcher import Recording
from accel.amd.queue import Queue
from accel.amd.runtime import Choices, open_runtime
from accel.amd.self_check import ProbeCase
from accel.amd.steps import buckets_of, for_matrices, step_of
from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import PlannedLaunch
from accel.kernels.recorded_tier import RecordedTier
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS
from accel.packets.schedule import schedule_levels
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import LoweredBatch, RecordedSubmissions, Recordings, StepFence
from accel.packets.tier import tier_info
from contract.arrays import Bytes
from contract.errors import DeviceLost, TierError
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.shape_key import ShapeKey

AmdRecordings = Recordings[Recording]


@dataclass(frozen=True, slots=True)
class AmdStep:
    """A submitted step; ``sources`` is where it writes ``outputs``."""

    queue: Queue
    number: int
    outputs: Mapping[str, Bytes]
    sources: Mapping[str, Allocation]

    def ended(self) -> bool:
        return self.queue.reached(self.number)

    def collect(self) -> None:
        for name, data in self.outputs.items():
            data[:] = self.sources[name].host[: data.nbytes]


class AmdSubmissions(RecordedSubmissions[Allocation, Recording, AmdStep]):
    """See RecordedSubmissions."""

    def __init__(self, queue: Queue, addresses: StepAddresses) -> None:
        super().__init__()
        self._queue = queue
        self._addresses = addresses

    def finish_all(self) -> None:
        """Wait for everything. Raises DeviceLost."""
        self._queue.wait(self._queue.number, DEFAULT_TIMEOUT_SECONDS)

    def _launch(
        self,
        batch: LoweredBatch[Allocation, AmdRecordings],
        slot: Recording,
        outputs: Mapping[str, Bytes],
    ) -> AmdStep:
        if self._in_flight and self._in_flight[-1][0].outputs:
            self.finish_all()
            self.retire()
        slot.bind(self._addresses)
        slot.number = self._queue.submit(self._queue.indirect_buffer(slot.buffer, slot.length))
        sources = {name: batch.outputs[name][1] for name in outputs}
        return AmdStep(self._queue, slot.number, outputs, sources)


AmdFence = StepFence[Allocation, AmdRecordings, AmdStep]


class AmdTier(RecordedTier[Allocation, Recording, AmdStep]):
    """See ``contract.tier.Tier``. ``device`` is part of a GPU's name; ``kernel`` is the system or a
    simulated one; ``tier`` is t1 or t2. Raises TierUnavailable saying what is missing."""

    _submissions: AmdSubmissions

    def __init__(
        self,
        device: str = "",
        choices: Choices | None = None,
        kernel: Kernel | None = None,
        tier: str = "t1",
    ) -> None:
        runtime = open_runtime(tier, kernel or Kernel(), device, choices or Choices())
        self._runtime = runtime
        self._device = gpu = runtime.device
        info = tier_info(gpu.tier, gpu.name, gpu.driver.version, gpu.capacity)
        queue, modules, addresses = runtime.queue, runtime.modules, runtime.addresses
        submissions = AmdSubmissions(queue, addresses)
        gpu.finish = submissions.finish_all
        launch = ProbeCase(gpu, queue, modules).launch
        arranger = PlaneArranger(gpu, launch, stage=partial(gpu.adopt, device=False))
        super().__init__(info, gpu, submissions, arranger, addresses, modules.kernels)

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        return buckets_of(largest)

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        with self._guarded("the self-test of products"):
            matrices = for_matrices(bucket) and self._runtime.uses_matrices()
        step = step_of(graph, bucket, self._device.tier, matrices)
        return step, schedule_levels(step)

    def _allocate(self, decl: BufferDecl, nbytes: int) -> Allocation:
        """The GPU's own memory, except for what the host reads after a step."""
        return self._device.allocate(decl.name, nbytes, decl.kind is not BufferKind.OUTPUT)

    def _recording(
        self, name: str, launches: list[PlannedLaunch[Any]], packets: int, input_bytes: int
    ) -> Recording:
        go = self._runtime.queue.go_address
        return Recording(self._device, name, launches, packets, input_bytes, go)

    def _finish(self) -> None:
        self._submissions.finish_all()

    @contextmanager
    def _translated(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierError(f"{self._device.name}: {purpose}: {error}") from None

    def _give_up(self) -> None:
        """Cancel what the device has not begun, and close its queue."""
        with suppress(OSError, DeviceLost):
            self._runtime.queue.cancel()
        with suppress(OSError):
            self._runtime.queue.close()

    def _shut_down(self) -> None:
        """End what runs, whatever was computed."""
        try:
            # Nobody waits for a device that is lost by now.
            with suppress(DeviceLost):
                self._runtime.queue.cancel()
        finally:
            try:
                self._runtime.close()
            except OSError as error:
                raise TierError(f"{self._device.name}: {error}") from None
