"""A simulated GPU: memory and queues as its drivers' users see them."""

import mmap
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.amd.generation import GFX12, Generation
from accel.amd.kernel import MAP_NORESERVE
from accel.amd.sim.coherence import Coherence
from accel.amd.sim.command_processor import CommandProcessor
from accel.amd.sim.memory_view import PAGE, GpuFault, MemoryView
from accel.packets.free_ranges import FreeRanges
from contract.arrays import Bytes

MADV_DONTNEED = 4
BASE = 0x7F00_0000_0000
"""The first address, the same in every process, so that streams of packets are reproducible."""


class AddressSpace:
    """A range of memory that host and GPU address alike; its pages are allocated when they are
    touched."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        data = np.frombuffer(self._map, np.uint8)
        self.view = MemoryView(data, BASE)
        self._ranges = FreeRanges(nbytes)
        self._ranges.allocate(PAGE)

    def reserve(self, nbytes: int) -> int:
        """The address of a free range. Raises MemoryError."""
        start = self._ranges.allocate(nbytes)
        if start is not None:
            return self.view.base + start
        raise MemoryError

    def release(self, address: int, nbytes: int) -> None:
        """Free a range."""
        self.drop(address, nbytes)
        self._ranges.free(address - self.view.base, nbytes)

    def drop(self, address: int, nbytes: int) -> None:
        """Zero the pages, and free their memory."""
        self._map.madvise(MADV_DONTNEED, address - self.view.base, nbytes)

    def host(self, address: int, nbytes: int) -> Bytes:
        """The bytes for the host, mapped for the GPU or not."""
        first = address - self.view.base
        return self.view.data[first : first + nbytes]


@dataclass(slots=True)
class FakeQueue:
    """A compute queue: a ring of words, pointers that count words, a doorbell.

    ``signalled`` is how far the driver's fence says the ring was read."""

    number: int
    doorbell: NDArray[np.uint64]
    ring: NDArray[np.uint32]
    write_pointer: NDArray[np.uint64]
    read_pointer: NDArray[np.uint32]
    processor: CommandProcessor
    fault: GpuFault | None = None
    done: int = 0
    signalled: int = 0

    def work(self, max_packets: int | None) -> None:
        """Process the ring up to the doorbell's value, or ``max_packets`` packets of it."""
        rung = int(self.doorbell[0])
        if self.fault is not None or (rung == self.done and not self.processor.inside):
            return
        size = len(self.ring)
        try:
            if not self.done <= rung <= self.done + size or rung > int(self.write_pointer[0]):
                raise GpuFault(f"doorbell {rung}, ring of {size} words at {self.done}")
            indices = np.arange(self.done, rung) % size
            self.done += self.processor.run(self.ring[indices].tolist(), max_packets)
        except GpuFault as fault:
            self.fault = fault
        self.read_pointer[0] = self.done % size

    def signal(self) -> None:
        """Handle PROTECTED_FENCE_SIGNAL."""
        self.signalled = int(self.doorbell[0])


@dataclass(slots=True)
class FakeGpu:
    """The parts of the GPU that queues need, and counters."""

    space: AddressSpace
    checked: bool
    generation: Generation = GFX12
    queues: dict[int, FakeQueue] = field(default_factory=dict)

    def add(
        self, number: int, doorbell: NDArray[np.uint64], ring: Bytes, write: int, read: int
    ) -> FakeQueue:
        """A new queue with its pointers at these addresses."""
        words = len(self.space.view.words)
        coherence = Coherence(words) if self.checked else None
        processor = CommandProcessor(self.space.view, coherence, generation=self.generation)
        queue = FakeQueue(
            number,
            doorbell,
            ring.view(np.uint32),
            self.space.host(write, 8).view(np.uint64),
            self.space.host(read, 4).view(np.uint32),
            processor,
        )
        self.queues[number] = queue
        return queue
