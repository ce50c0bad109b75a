"""Memory of one device, and page-locked memory of the host that it copies from and to."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.cuda.driver import OUT_OF_MEMORY, Context, CudaError
from accel.packets.packet import aligned
from accel.packets.staging_buffers import Bytes, StagingBuffers
from contract.errors import OutOfMemory

PAGE_BYTES = 4096


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` at ``address`` on the device, see ``accel.packets.staging_buffers.Staged``."""

    address: int
    nbytes: int
    host: Bytes | None = None
    sent: bool = True
    fetched: bool = True


_ABANDONED: list[Bytes] = []
"""What a device that does not answer may still write to: never given back."""


class Pinned:
    """Page-locked host memory: what the device copies from and to while the host goes on.

    ``take`` gives bytes that can be had again once nothing refers to them. They stay readable when
    the context is gone: the memory is the host's own, and the driver was only told of it. Any
    thread may take some.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._free: dict[int, list[Bytes]] = {}
        self._places: list[Bytes] = []

    @property
    def nbytes(self) -> int:
        """Host memory of all that was ever taken."""
        return sum(place.nbytes for place in self._places)

    def take(self, nbytes: int) -> Bytes:
        """uint8[nbytes] of any content."""
        size = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        free = self._free.setdefault(size, [])
        try:
            place = free.pop()
        except IndexError:
            place = self._make(size)
        block = (ctypes.c_uint8 * nbytes).from_buffer(place.data)
        weakref.finalize(block, free.append, place)
        return np.ndarray((nbytes,), np.uint8, buffer=memoryview(block))

    def zeroed(self, nbytes: int) -> Bytes:
        """As ``take``, all zero."""
        block = self.take(nbytes)
        block[:] = 0
        return block

    def forget(self) -> None:
        """The context is gone, and with it what the driver knew of the memory."""
        self._places.clear()
        self._free.clear()

    def abandon(self) -> None:
        """The device may still write to the memory."""
        _ABANDONED.extend(self._places)
        self.forget()

    def _make(self, size: int) -> Bytes:
        memory = np.empty(size + PAGE_BYTES, np.uint8)
        start = -memory.ctypes.data % PAGE_BYTES
        place = memory[start : start + size]
        # The driver would have pages made one after the other, whoever else asks.
        place[::PAGE_BYTES] = 0
        # Where a sandbox forbids it copies take longer, and are right all the same.
        with suppress(CudaError):
            self._context.call("cuMemHostRegister", place.ctypes.data, size, 0)
        self._places.append(place)
        return place


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy in the order of the stream."""

    memory: Memory

    def wait(self) -> None:
        """Return when it has ended, and all before it."""
        self.memory.synchronize()


@dataclass(frozen=True, slots=True)
class Streams:
    """Queues of one device: that of steps and most copies, and beside it what brings inputs of
    steps to the device and small outputs to the host."""

    steps: Any
    inputs: Any
    outputs: Any


@dataclass(slots=True)
class Memory:
    """Allocations on one device, at most ``capacity`` bytes in all. Copies run on ``stream``."""

    context: Context
    streams: Streams
    capacity: int
    pinned: Pinned
    held: int = 0
    """Bytes taken from the device."""
    spare: Callable[[], None] = lambda: None
    """Gives back what is held for convenience."""
    staging: StagingBuffers[Allocation, Copy] = field(init=False)

    def __post_init__(self) -> None:
        self.staging = StagingBuffers(self.transfer, self.pinned.zeroed)

    @property
    def stream(self) -> Any:
        """That of steps."""
        return self.streams.steps

    @property
    def available(self) -> int:
        """Bytes that can still be taken: what nobody on the device uses."""
        free, _ = self.context.call("cuMemGetInfo")
        return max(0, min(int(free), self.capacity - self.held))

    def allocate(self, what: str, nbytes: int, *, zeroed: bool = True) -> Allocation:
        """Memory that is zeroed unless told otherwise. Raises OutOfMemory naming ``what``."""
        size = aligned(nbytes)
        address = self._taken(size)
        if address is None:
            self.spare()
            address = self._taken(size)
        if address is None:
            raise OutOfMemory(what, nbytes, self.held, self.available)
        self.held += size
        if zeroed:
            self.context.call("cuMemsetD32Async", address, 0, size // 4, self.stream)
        return Allocation(address, nbytes)

    def adopt(self, what: str, data: Bytes) -> Allocation:
        """Memory holding ``data``, whose bytes were read when this returns."""
        allocation = self.allocate(what, data.nbytes, zeroed=False)
        if data.nbytes:
            self.transfer(allocation, np.ascontiguousarray(data).reshape(-1), True, 0).wait()
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give the memory back, of which nothing may still be in use."""
        self.staging.forget(allocation)
        self.held -= aligned(allocation.nbytes)
        if not self.context.closed:
            self.context.call("cuMemFree", allocation.address)

    def map(self, allocation: Allocation) -> Bytes:
        """The bytes in host memory, from now on exchanged as the allocation says."""
        return self.staging.map(allocation)

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes."""
        return self.staging.read(allocation, offset, nbytes)

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """Replace some of the bytes."""
        self.staging.write(allocation, offset, data)

    def transfer(self, allocation: Allocation, host: Bytes, to_device: bool, first: int) -> Copy:
        """Enqueue a copy between ``host`` and the allocation, from its byte ``first`` on.

        It runs while the host goes on where ``host`` is page-locked.
        """
        place, here = allocation.address + first, host.ctypes.data
        if to_device:
            self.context.call("cuMemcpyHtoDAsync", place, here, host.nbytes, self.stream)
        else:
            self.context.call("cuMemcpyDtoHAsync", here, place, host.nbytes, self.stream)
        return Copy(self)

    def leave(self, allocation: Allocation, host: Bytes, to_device: bool, first: int) -> Copy:
        """As ``transfer`` to the host, in the order of ``streams.outputs``."""
        assert not to_device
        place, here = allocation.address + first, host.ctypes.data
        self.context.call("cuMemcpyDtoHAsync", here, place, host.nbytes, self.streams.outputs)
        return Copy(self)

    def synchronize(self) -> None:
        """Return when the streams are empty."""
        for stream in (self.streams.inputs, self.stream, self.streams.outputs):
            self.context.call("cuStreamSynchronize", stream)

    def _taken(self, size: int) -> int | None:
        if size > self.capacity - self.held:
            return None
        try:
            return int(self.context.call("cuMemAlloc", size))
        except CudaError as error:
            if error.name != OUT_OF_MEMORY:
                raise
            return None
