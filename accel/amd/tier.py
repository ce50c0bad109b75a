"""Tiers T1 and T2: a graph becomes packets of the command processor, and a step is one write to its
ring.

They differ in the driver that provides memory and queue, see ``kfd.py`` and ``userq.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.amd.device import Allocation
from accel.amd.kernel import Kernel, LinuxKernel
from accel.amd.launcher import Recording, launch_alone
from accel.amd.memory import Bytes, HostSeenMemory
from accel.amd.runtime import Choices, Runtime, open_runtime
from accel.amd.steps import buckets_of, for_matrices, step_of
from accel.amd.submissions import AmdForm, AmdStep, AmdSubmissions
from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import MOST_GROUPS, launches_of
from accel.kernels.source import Module
from accel.packets.buffers import ArrangedMatrix, DeviceBuffer
from accel.packets.packet_tier import BoundStep, PacketTier
from accel.packets.schedule import schedule_levels
from accel.packets.step import Schedule, Step
from accel.packets.submissions import FormBatch, StepFence
from accel.packets.tier import tier_info
from contract.errors import DeviceLost, TierError
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier

AmdBatch = FormBatch[Allocation, AmdForm]
AmdFence = StepFence[Allocation, AmdForm, AmdStep]


class AmdTier(PacketTier[Allocation, AmdForm, AmdStep]):
    """See ``contract.tier.Tier``. ``device`` is part of a GPU's name; ``kernel`` is the system or a
    simulated one; ``tier`` is t1 or t2.

    Raises TierUnavailable saying what is missing.
    """

    _memory: HostSeenMemory
    _submissions: AmdSubmissions

    def __init__(
        self,
        device: str = "",
        choices: Choices | None = None,
        kernel: Kernel | None = None,
        tier: str = "t1",
    ) -> None:
        self._runtime = open_runtime(tier, kernel or LinuxKernel(), device, choices or Choices())
        self._device = self._runtime.device
        name, driver = self._device.name, self._device.driver.version
        info = tier_info(self._device.tier, name, driver, self._device.capacity)
        submissions = AmdSubmissions(self._runtime.queue, self._runtime.addresses)
        memory = HostSeenMemory(self._device, submissions.finish_all)
        self._arranger = Arranger(memory, self._runtime)
        super().__init__(info, memory, submissions)

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        """See ``contract.tier.Tier``."""
        return buckets_of(largest)

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        with self._guarded("the self-test of products"):
            matrices = for_matrices(bucket) and self._runtime.multiplies()
        step = step_of(graph, bucket, self._device.tier, matrices)
        return step, schedule_levels(step)

    def _allocate(self, decl: BufferDecl, nbytes: int) -> Allocation:
        """The GPU's own memory, except for what the host reads after a step."""
        return self._memory.allocate(decl.name, nbytes, decl.kind is not BufferKind.OUTPUT)

    def _arrange(
        self, decl: BufferDecl, data: NDArray[np.uint8], matrices: int
    ) -> ArrangedMatrix[Allocation]:
        return self._arranger.upload(decl.name, decl.dtype, data, matrices)

    def _record(self, bound: BoundStep[Allocation]) -> AmdForm:
        device, address, nbytes = self._device, bound.stored.address, bound.input_bytes
        launches = launches_of(
            self._runtime.modules.kernels, bound.step.ops, bound.schedule.placements
        )

        def record() -> Recording:
            go = self._runtime.queue.go_address
            return Recording(device, bound.name, launches, address, nbytes, go)

        return AmdForm(record)

    def _discard(self, launch: AmdForm) -> None:
        for recording in launch.made:
            self._device.free(recording.allocation)

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        self._runtime.addresses.move(self._scratch_of(shared).address, 0)

    def _finish(self) -> None:
        self._submissions.finish_all()

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierError(f"{self._device.name}: {what}: {error}") from None

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


if TYPE_CHECKING:
    _conforms: type[DeviceTier[DeviceBuffer[Allocation], AmdBatch, AmdFence]] = AmdTier


class Arranger(PlaneArranger[Allocation]):
    """Arranges matrices on one GPU, from host memory that it can access."""

    def __init__(self, memory: HostSeenMemory, runtime: Runtime) -> None:
        super().__init__(memory, MOST_GROUPS)
        self._runtime = runtime

    def _staged(self, name: str, data: Bytes) -> Allocation:
        staging = self._runtime.device.allocate(name, data.nbytes, device=False)
        staging.host[:] = data.reshape(-1)
        return staging

    def _launch(
        self, module: Module, operands: Sequence[int], sizes: Sequence[int], groups: int
    ) -> None:
        runtime = self._runtime
        kernel = runtime.modules.kernel(module)
        launch_alone(runtime.device, runtime.queue, kernel, operands, sizes, groups)
