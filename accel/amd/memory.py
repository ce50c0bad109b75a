"""A GPU's memory for the tiers: the host can access all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from accel.amd.device import Allocation, Device
from contract.arrays import Bytes


@dataclass(frozen=True, slots=True)
class HostSeenMemory:
    """See ``accel.packets.tier.DeviceMemory``. ``finish`` waits for everything submitted."""

    device: Device
    finish: Callable[[], None]

    @property
    def held(self) -> int:
        """Allocated bytes of the GPU's own memory."""
        return self.device.held

    @property
    def available(self) -> int:
        """Bytes of the GPU's own memory that can still be allocated."""
        return self.device.available

    def expect(self, nbytes: int) -> None:
        """See DeviceMemory: does nothing, since every allocation has pages of its own."""

    def allocate(self, purpose: str, nbytes: int, own: bool = True) -> Allocation:
        """Zeroed memory, the GPU's own or the host's. Raises OutOfMemory naming its purpose
        ``purpose``."""
        allocation = self.device.allocate(purpose, nbytes, own)
        allocation.host[:] = 0
        return allocation

    def adopt(self, purpose: str, data: Bytes, own: bool = True) -> Allocation:
        """Memory with the contents ``data``, the GPU's own or the host's."""
        allocation = self.device.allocate(purpose, data.nbytes, own)
        allocation.host[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free memory that nothing uses any more."""
        self.device.free(allocation)

    def map(self, allocation: Allocation) -> Bytes:
        """The bytes."""
        return allocation.host

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes, after everything submitted has ended."""
        self.finish()
        return allocation.host[offset : offset + nbytes].copy()

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """Replace some of the bytes, after everything submitted has ended."""
        self.finish()
        allocation.host[offset : offset + data.nbytes] = data
