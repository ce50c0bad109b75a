"""A GPU that is not there: memory, queues and interrupts as amdkfd's user sees them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.amd.coherence import Coherence
from accel.amd.command_processor import CommandProcessor
from accel.amd.kernel import MAP_NORESERVE, Bytes
from accel.amd.memory_view import PAGE, GpuFault, MemoryView

MADV_DONTNEED = 4


class AddressSpace:
    """A range of this process' memory whose pages come into being when they are touched: what host
    and GPU address alike."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        data = np.frombuffer(self._map, np.uint8)
        self.view = MemoryView(data, int(data.ctypes.data))
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
    """A compute queue: a ring of words, pointers that count words, a doorbell."""

    number: int
    ring: NDArray[np.uint32]
    write_pointer: NDArray[np.uint64]
    read_pointer: NDArray[np.uint32]
    processor: CommandProcessor
    fault: GpuFault | None = None
    done: int = 0

    def work(self, told: int) -> None:
        """Go through what the ring has up to ``told``, as the doorbell says."""
        if self.fault is not None or told == self.done:
            return
        size = len(self.ring)
        try:
            if not self.done <= told <= self.done + size or told > int(self.write_pointer[0]):
                raise GpuFault(f"doorbell {told}, ring of {size} words at {self.done}")
            places = np.arange(self.done, told) % size
            self.done += self.processor.run(self.ring[places].tolist())
        except GpuFault as fault:
            self.fault = fault
        self.read_pointer[0] = self.done % size


@dataclass(slots=True)
class FakeGpu:
    """What a queue of the GPU needs of it, and what was counted."""

    space: AddressSpace
    checked: bool
    queues: dict[int, FakeQueue] = field(default_factory=dict)
    interrupts: list[int] = field(default_factory=list)

    def processor(self, has_eop_buffer: bool) -> CommandProcessor:
        """For a new queue."""
        words = len(self.space.view.words)
        coherence = Coherence(words) if self.checked else None
        return CommandProcessor(self.space.view, self.interrupts.append, coherence, has_eop_buffer)
