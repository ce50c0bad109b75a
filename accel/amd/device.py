"""An open GPU and its memory, whichever driver of Linux provides it.

T1 uses amdkfd (``kfd.py``), T2 the graphics driver (``userq.py``). This module and ``queue.py``
have what both share: addresses that host and GPU have in common, a ring, a doorbell."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from accel.amd.generation import BY_ARCHITECTURE, Generation
from accel.amd.kernel import Kernel
from accel.amd.topology import PAGE
from contract.arrays import Bytes
from contract.errors import OutOfMemory, TierUnavailable

T = TypeVar("T")

NO_GPU = "there is no AMD GPU"
SIMULATED_HERE = (Path(__file__).parent / "sim").is_dir()
"""Whether the simulated GPU is there; wheels leave it out."""
SIMULATE = f"--device simulated needs no GPU{'' if SIMULATED_HERE else ', in a checkout'}"
REMEDIES = {
    errno.ENOENT: ("there is no {path}", f"load the amdgpu driver; {SIMULATE}"),
    errno.EACCES: ("{path} may not be opened", "add yourself to the groups render and video"),
    errno.EAGAIN: ("the GPU is being reset", "try again in a few seconds"),
}


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` bytes of memory at an ``address`` that is the same for host and GPU."""

    address: int
    nbytes: int
    reserved: int
    handle: int
    device: bool
    host: Bytes


@dataclass(frozen=True, slots=True)
class QueueMemory:
    """The memory of a queue: a ring, and its pointers in pages of their own.

    ``more`` allocates zeroed host memory for other needs of a driver; it lives as long as the
    queue."""

    ring: Allocation
    write: Allocation
    read: Allocation
    more: Callable[[str, int], Allocation]


class DriverQueue(Protocol):
    """A queue of a driver."""

    doorbell: NDArray[np.uint64]
    buffer_flags: int
    """The flags of INDIRECT_BUFFER packets."""
    last_words: Sequence[int]
    """Packets to write into the ring before the queue is closed."""

    def fault(self) -> str:
        """The fault that the driver reports, empty without one. Raises OSError."""

    def settle(self) -> None:
        """Wait until the driver knows that everything up to ``last_words`` has ended. Raises
        OSError."""

    def close(self) -> None:
        """Remove the queue from the GPU, running or not."""


class Driver(Protocol):
    """The Linux driver of one open GPU. Functions raise OSError as system calls do."""

    tier: str
    gpu: str
    architecture: str
    """The compiler's name of the GPU's architecture."""
    version: str
    rsrc1: int
    """Bits that the queues need in RSRC1 of every launch."""
    memory_bytes: int
    """Bytes of the GPU's own memory that the host can access."""

    def make(self, address: int, nbytes: int, own: bool) -> int:
        """Map memory at a reserved address for host and GPU, and return its handle. With ``own`` it
        is the GPU's own memory."""

    def drop(self, handle: int, address: int, nbytes: int) -> None:
        """Free memory; its addresses stay reserved."""

    def create_queue(self, memory: QueueMemory) -> DriverQueue:
        """A new compute queue."""

    def close(self) -> None:
        """Close the files."""


class Device:
    """The memory of a GPU, all of which the host can access; see
    ``accel.packets.tier.DeviceMemory``. Sizes in bytes; ``held`` is the allocated part of its own
    memory. ``finish`` waits for everything submitted: who submits replaces it."""

    def __init__(self, kernel: Kernel, driver: Driver, max_bytes: int | None = None) -> None:
        self.kernel = kernel
        self.driver = driver
        self.tier = driver.tier
        self.held = 0
        self.finish: Callable[[], None] = lambda: None
        self.capacity = min(driver.memory_bytes, max_bytes or driver.memory_bytes)
        self._allocations: set[Allocation] = set()

    @property
    def name(self) -> str:
        """The name shown to users."""
        return f"{self.driver.gpu} (simulated)" if self.kernel.simulated else self.driver.gpu

    @property
    def generation(self) -> Generation:
        """The properties in which it differs from other GPUs."""
        return BY_ARCHITECTURE[self.driver.architecture]

    @property
    def available(self) -> int:
        """Bytes of its own memory that can still be allocated."""
        return self.capacity - self.held

    @property
    def allocations(self) -> list[Allocation]:
        """All allocations, by address."""
        return sorted(self._allocations, key=lambda allocation: allocation.address)

    def expect(self, nbytes: int) -> None:
        """See DeviceMemory: does nothing, since every allocation has pages of its own."""

    def allocate(self, purpose: str, nbytes: int, device: bool = True) -> Allocation:
        """Zeroed memory, the GPU's own or host memory it can access. Raises OutOfMemory naming its
        purpose ``purpose``."""
        allocation = self._allocate(purpose, nbytes, device)
        allocation.host[:] = 0
        return allocation

    def adopt(self, purpose: str, data: Bytes, device: bool = True) -> Allocation:
        """Memory as of ``allocate`` with the contents ``data``."""
        allocation = self._allocate(purpose, data.nbytes, device)
        allocation.host[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return allocation

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

    def _allocate(self, purpose: str, nbytes: int, device: bool) -> Allocation:
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        if device and size > self.available:
            raise OutOfMemory(purpose, size, self.held, self.available)
        with ExitStack() as undo:
            try:
                address = self.kernel.reserve(size)
                undo.callback(self.kernel.unmap, address, size)
                handle = self.driver.make(address, size, device)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise OutOfMemory(purpose, size, self.held, self.available) from None
            undo.pop_all()
        self.held += size if device else 0
        host = self.kernel.view(address, size)
        allocation = Allocation(address, nbytes, size, handle, device, host[:nbytes])
        self._allocations.add(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free memory that nothing uses any more."""
        self._allocations.remove(allocation)
        self.driver.drop(allocation.handle, allocation.address, allocation.reserved)
        self.kernel.unmap(allocation.address, allocation.reserved)
        self.held -= allocation.reserved if allocation.device else 0

    def close(self) -> None:
        """Free all memory, which nothing may use any more, and close the files."""
        with ExitStack() as undo:
            undo.callback(self.driver.close)
            for allocation in self.allocations:
                undo.callback(self.free, allocation)


def opened(tier: str, open_it: Callable[[str], int], path: str) -> int:
    """The file of a driver. Raises TierUnavailable with a remedy."""
    try:
        return open_it(path)
    except OSError as error:
        known = REMEDIES.get(error.errno or 0)
        if known is None:
            raise TierUnavailable(tier, f"{path}: {error}", "see dmesg") from None
        raise TierUnavailable(tier, known[0].format(path=path), known[1]) from None


def chosen(tier: str, found: Sequence[tuple[str, str, T]], requested: str) -> T:
    """The first of (name, architecture, GPU) that has kernels and whose name contains
    ``requested``. Raises TierUnavailable."""
    named = [gpu for gpu in found if requested.lower() in gpu[0].lower()]
    known = BY_ARCHITECTURE
    for _, architecture, gpu in named:
        if architecture in known:
            return gpu
    if named:
        listed = ", ".join(f"{name} ({architecture})" for name, architecture, _ in named)
        raise TierUnavailable(
            tier, f"no kernels for {listed}", f"there are some for {', '.join(known)}"
        )
    listed = ", ".join(name for name, *_ in found) or "none"
    reason = f"no AMD GPU is named {requested!r}" if requested else NO_GPU
    raise TierUnavailable(tier, reason, f"GPUs here: {listed}; {SIMULATE}")


def small_bar(tier: str, name: str) -> TierUnavailable:
    """The error for a GPU whose memory the host cannot access entirely, which it must."""
    reason = f"the host does not see all memory of {name}"
    return TierUnavailable(tier, reason, "enable resizable BAR in the firmware's settings")
