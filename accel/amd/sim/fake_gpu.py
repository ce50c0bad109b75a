"""A GPU that is not there: memory, queues and interrupts as its drivers' users see them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.amd.generation import GFX12, Generation
from accel.amd.kernel import MAP_NORESERVE, Bytes
from accel.amd.sim.coherence import Coherence
from accel.amd.sim.command_processor import CommandProcessor
from accel.amd.sim.memory_view import PAGE, GpuFault, MemoryView

MADV_DONTNEED = 4
BASE = 0x7F00_0000_0000
"""The first address there is: the same in every process, so that streams of packets are."""


class AddressSpace:
    """A range of memory whose pages come into being when they are touched: what host and GPU
    address alike."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        data = np.frombuffer(self._map, np.uint8)
        self.view = MemoryView(data, BASE)
        self._holes: list[tuple[int, int]] = [(PAGE, nbytes)]

    def reserve(self, nbytes: int) -> int:
        """The address of a free range. Raises MemoryError."""
        for place, (start, end) in enumerate(self._holes):
            if end - start >= nbytes:
                rest = [(start + nbytes, end)] if start + nbytes < end else []
                self._holes[place : place + 1] = rest
                return self.view.base + start
        raise MemoryError

    def release(self, address: int, nbytes: int) -> None:
        """Give a range back."""
        self.drop(address, nbytes)
        start = address - self.view.base
        holes = sorted([*self._holes, (start, start + nbytes)])
        joined = [holes[0]]
        for first, end in holes[1:]:
            if joined[-1][1] == first:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((first, end))
        self._holes = joined

    def drop(self, address: int, nbytes: int) -> None:
        """The pages are zero again and take no memory."""
        self._map.madvise(MADV_DONTNEED, address - self.view.base, nbytes)

    def host(self, address: int, nbytes: int) -> Bytes:
        """The bytes as the host sees them, mapped for the GPU or not."""
        first = address - self.view.base
        return self.view.data[first : first + nbytes]


@dataclass(slots=True)
class FakeQueue:
    """A compute queue: a ring of words, pointers that count words, a doorbell. ``signalled`` is
    how far the driver's own fence says it was read."""

    number: int
    doorbell: NDArray[np.uint64]
    ring: NDArray[np.uint32]
    write_pointer: NDArray[np.uint64]
    read_pointer: NDArray[np.uint32]
    processor: CommandProcessor
    fault: GpuFault | None = None
    done: int = 0
    signalled: int = 0

    def work(self, most_packets: int | None) -> None:
        """Go through what the ring has up to where the doorbell says, or ``most_packets`` of it."""
        told = int(self.doorbell[0])
        if self.fault is not None or (told == self.done and not self.processor.inside):
            return
        size = len(self.ring)
        try:
            if not self.done <= told <= self.done + size or told > int(self.write_pointer[0]):
                raise GpuFault(f"doorbell {told}, ring of {size} words at {self.done}")
            places = np.arange(self.done, told) % size
            self.done += self.processor.run(self.ring[places].tolist(), most_packets)
        except GpuFault as fault:
            self.fault = fault
        self.read_pointer[0] = self.done % size

    def signal(self) -> None:
        """PROTECTED_FENCE_SIGNAL was met."""
        self.signalled = int(self.doorbell[0])


@dataclass(slots=True)
class FakeGpu:
    """What a queue of the GPU needs of it, and what was counted."""

    space: AddressSpace
    checked: bool
    generation: Generation = GFX12
    queues: dict[int, FakeQueue] = field(default_factory=dict)
    interrupts: list[int] = field(default_factory=list)

    def add(
        self, number: int, doorbell: NDArray[np.uint64], ring: Bytes, write: int, read: int
    ) -> FakeQueue:
        """A new queue, whose pointers are at those addresses."""
        words = len(self.space.view.words)
        coherence = Coherence(words) if self.checked else None
        processor = CommandProcessor(
            self.space.view, self.interrupts.append, coherence, generation=self.generation
        )
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
