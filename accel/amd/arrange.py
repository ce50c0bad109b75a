"""The GPU arranges matrices for the products when they are uploaded."""

from __future__ import annotations

from collections.abc import Sequence

from accel.amd.device import Allocation
from accel.amd.launcher import launch_alone
from accel.amd.memory import Bytes, HostSeenMemory
from accel.amd.runtime import Runtime
from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import MOST_GROUPS
from accel.kernels.source import Module


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
