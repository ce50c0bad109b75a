"""An opened GPU: its memory, whoever of the kernel's drivers it comes from.

T1 speaks with amdkfd (``kfd.py``), T2 with the graphics driver (``userq.py``). What they have in
common is here and in ``queue.py``: addresses that host and GPU share, a ring, a doorbell.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from accel.amd.generation import BY_ARCHITECTURE, Generation
from accel.amd.kernel import Bytes, Kernel
from accel.amd.topology import PAGE
from contract.errors import OutOfMemory, TierUnavailable

T = TypeVar("T")

NO_GPU = "there is no AMD GPU"
SIMULATE = "--device simulated needs no GPU"
REMEDIES = {
    errno.ENOENT: ("there is no {path}", f"load the amdgpu driver; {SIMULATE}"),
    errno.EACCES: ("{path} may not be opened", "add yourself to the groups render and video"),
    errno.EAGAIN: ("the GPU is being reset", "try again in a few seconds"),
}


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` of memory at an ``address`` that is the host's as well as the GPU's."""

    address: int
    nbytes: int
    reserved: int
    handle: int
    device: bool
    host: Bytes


@dataclass(frozen=True, slots=True)
class QueueMemory:
    """What every queue has: a ring, its pointers in pages of their own. ``more`` gives zeroed host
    memory for whatever else a driver wants, which lives as long as the queue."""

    ring: Allocation
    write: Allocation
    read: Allocation
    more: Callable[[str, int], Allocation]


class DriverQueue(Protocol):
    """A queue as the driver knows it."""

    doorbell: NDArray[np.uint64]
    buffer_flags: int
    """Of INDIRECT_BUFFER."""
    last_words: Sequence[int]
    """Packets that go into the ring before the queue is given back."""

    def fault(self) -> str:
        """What the driver reports; nothing while all is well. Raises OSError."""

    def settle(self) -> None:
        """Wait until the driver knows that everything up to ``last_words`` has ended. Raises
        OSError."""

    def close(self) -> None:
        """Take the queue from the GPU, running or not."""


class Driver(Protocol):
    """The kernel's driver of one opened GPU. Functions raise OSError as the system does."""

    tier: str
    gpu: str
    architecture: str
    """As compilers call it."""
    version: str
    rsrc1: int
    """Bits that its queues want in RSRC1 of every launch."""
    memory_bytes: int
    """Of the GPU's own that the host sees."""

    def make(self, address: int, nbytes: int, own: bool) -> int:
        """Memory at an address that was reserved, for host and GPU; its handle. ``own`` asks for
        the GPU's own."""

    def drop(self, handle: int, address: int, nbytes: int) -> None:
        """Give memory back; its addresses stay reserved."""

    def create_queue(self, memory: QueueMemory) -> DriverQueue:
        """A compute queue."""

    def close(self) -> None:
        """Give the files back."""


class Device:
    """Memory of a GPU. Sizes in bytes; ``held`` is its own memory that is allocated."""

    def __init__(self, kernel: Kernel, driver: Driver, most_bytes: int | None = None) -> None:
        self.kernel = kernel
        self.driver = driver
        self.tier = driver.tier
        self.held = 0
        self.capacity = min(driver.memory_bytes, most_bytes or driver.memory_bytes)
        self._allocations: set[Allocation] = set()

    @property
    def name(self) -> str:
        """What a user is told."""
        return f"{self.driver.gpu} (simulated)" if self.kernel.simulated else self.driver.gpu

    @property
    def generation(self) -> Generation:
        """What it differs in from other GPUs."""
        return BY_ARCHITECTURE[self.driver.architecture]

    @property
    def available(self) -> int:
        """Bytes of its own memory that can still be had."""
        return self.capacity - self.held

    @property
    def allocations(self) -> list[Allocation]:
        """All there are, by address."""
        return sorted(self._allocations, key=lambda allocation: allocation.address)

    def allocate(self, what: str, nbytes: int, device: bool = True) -> Allocation:
        """Memory of the GPU's own, or host memory it sees. Raises OutOfMemory naming ``what``."""
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        if device and size > self.available:
            raise OutOfMemory(what, size, self.held, self.available)
        with ExitStack() as undo:
            try:
                address = self.kernel.reserve(size)
                undo.callback(self.kernel.unmap, address, size)
                handle = self.driver.make(address, size, device)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise OutOfMemory(what, size, self.held, self.available) from None
            undo.pop_all()
        self.held += size if device else 0
        host = self.kernel.view(address, size)
        allocation = Allocation(address, nbytes, size, handle, device, host[:nbytes])
        self._allocations.add(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give memory back that nothing uses any more."""
        self._allocations.remove(allocation)
        self.driver.drop(allocation.handle, allocation.address, allocation.reserved)
        self.kernel.unmap(allocation.address, allocation.reserved)
        self.held -= allocation.reserved if allocation.device else 0

    def close(self) -> None:
        """Give all memory back, of which nothing may run any more, and the files."""
        with ExitStack() as undo:
            undo.callback(self.driver.close)
            for allocation in self.allocations:
                undo.callback(self.free, allocation)


def opened(tier: str, open_it: Callable[[str], int], path: str) -> int:
    """A driver's file. Raises TierUnavailable with what helps."""
    try:
        return open_it(path)
    except OSError as error:
        known = REMEDIES.get(error.errno or 0)
        if known is None:
            raise TierUnavailable(tier, f"{path}: {error}", "see dmesg") from None
        raise TierUnavailable(tier, known[0].format(path=path), known[1]) from None


def chosen(tier: str, found: Sequence[tuple[str, str, T]], requested: str) -> T:
    """The first of (name, target, GPU) with code for it whose name contains ``requested``.

    Raises TierUnavailable.
    """
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
    """The host writes all of the GPU's memory, which it must see."""
    reason = f"the host does not see all memory of {name}"
    return TierUnavailable(tier, reason, "enable resizable BAR in the firmware's settings")
