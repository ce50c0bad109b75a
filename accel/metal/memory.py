"""Memory that device and host share: ranges of a few large MTLBuffers, with GPU addresses."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.metal.objc import NoObject
from accel.metal.queue import Queue
from accel.packets.holes import Holes
from accel.packets.packet import ALIGNMENT, aligned
from contract.errors import OutOfMemory

MIN_ARENA_BYTES = 64 << 10
MAX_ARENA_BYTES = 1 << 30
"""Largest arena for more than one allocation."""
STEPS_ARENA_BYTES = 1 << 20
GROWTH = 64
"""An arena for unexpected allocations is this part of all allocated memory."""
SHARED_TRACKED = 0
"""MTLResourceOptions: shared storage, the default cache, and hazards tracked by Metal."""
VIEW_BYTES = 1 << 20
"""Fewest bytes of a mapped file that are used without a copy; less is copied, since each step must
name every view as one more buffer."""
BUFFER_METHODS = ("contents", "gpuAddress")

Bytes = NDArray[np.uint8]


class Kind(Enum):
    """The purpose of an arena."""

    MODEL = auto()
    """Buffers of graphs and what batches keep: memory that a plan counts."""
    STEPS = auto()
    """Inputs and outputs of steps in flight."""
    VIEW = auto()
    """Host memory that the device can access."""


@dataclass(slots=True, eq=False)
class Arena:
    """One MTLBuffer. ``host`` are its bytes; ``holes`` its free ranges."""

    buffer: Any
    address: int
    nbytes: int
    host: Bytes
    holes: Holes
    kind: Kind


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` bytes at ``address``, ``offset`` bytes into the arena."""

    arena: Arena
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """The address that a packet contains."""
        return self.arena.address + self.offset

    @property
    def host(self) -> Bytes:
        """The bytes, which the host can access."""
        return self.arena.host[self.offset : self.offset + self.nbytes]


class Memory:
    """All memory of one device. Sizes in bytes. ``capacity`` is the most it allocates."""

    def __init__(self, queue: Queue, capacity: int) -> None:
        self.queue = queue
        self.capacity = capacity
        self._arenas: list[Arena] = []
        self._resources: tuple[Any, int] | None = None
        self._expected = 0
        self._allocated = 0

    @property
    def held(self) -> int:
        """Bytes allocated for the model, unused ones included."""
        return sum(arena.nbytes for arena in self._arenas if arena.kind is Kind.MODEL)

    @property
    def available(self) -> int:
        """Bytes that can still be allocated: limited by the capacity and by macOS's
        recommendation."""
        send, device = self.queue.objc.send, self.queue.device
        current = int(send(device.handle, "currentAllocatedSize"))
        return max(0, min(self.capacity - self.held, device.memory_bytes - current))

    @property
    def resources(self) -> tuple[Any, int]:
        """``id[]`` of every buffer and their number, for kernels that use addresses."""
        if self._resources is None:
            buffers = [arena.buffer for arena in self._arenas]
            self._resources = self.queue.objc.ffi.new("id[]", buffers), len(buffers)
        return self._resources

    def expect(self, nbytes: int) -> None:
        """Reserve room for allocations of ``nbytes`` bytes in all, alignment included."""
        self._expected = self._allocated + nbytes

    def allocate(self, what: str, nbytes: int, kind: Kind = Kind.MODEL) -> Allocation:
        """Zeroed memory. Raises OutOfMemory naming its purpose ``what``."""
        size = aligned(nbytes)
        allocation = self._allocate(what, nbytes, size, kind)
        if kind is Kind.MODEL:
            self._allocated += size
        allocation.host[:] = 0
        return allocation

    def adopt(self, what: str, data: Bytes) -> Allocation:
        """Memory with the contents ``data``: a view of a mapped file if it is large enough, else a
        copy."""
        seen = self.view(data) if data.nbytes >= VIEW_BYTES else None
        if seen is not None:
            return seen
        allocation = self.allocate(what, data.nbytes)
        allocation.host[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return allocation

    def view(self, data: Bytes) -> Allocation | None:
        """The pages of ``data`` as the device accesses them, None unless they belong to one mapped
        file and Metal accepts them."""
        file = mapped_file(data)
        if file is None or not data.nbytes:
            return None
        ffi, send = self.queue.objc.ffi, self.queue.objc.send
        address = data.__array_interface__["data"][0]
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + data.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = end - start
        if nbytes > self.queue.device.max_buffer_bytes:
            return None
        method = "newBufferWithBytesNoCopy:length:options:deallocator:"
        pointer = ffi.cast("void *", start)
        device = self.queue.device.handle
        buffer = send(device, method, pointer, nbytes, SHARED_TRACKED, ffi.NULL)
        if buffer == ffi.NULL:
            return None
        arena = self._added(buffer, nbytes, Kind.VIEW)
        return Allocation(arena, address - start, data.nbytes)

    def map(self, allocation: Allocation) -> Bytes:
        """The bytes, which the host can access."""
        return allocation.host

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes, after everything committed has ended."""
        self.queue.finish()
        return allocation.host[offset : offset + nbytes].copy()

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """Replace some of the bytes, after everything committed has ended."""
        self.queue.finish()
        allocation.host[offset : offset + data.nbytes] = data

    def free(self, allocation: Allocation) -> None:
        """Free the memory, which nothing committed may still use."""
        arena = allocation.arena
        if arena not in self._arenas:
            return
        if arena.kind is not Kind.VIEW:
            size = aligned(allocation.nbytes)
            arena.holes.give_back(allocation.offset, size)
            self._allocated -= size if arena.kind is Kind.MODEL else 0
        if arena.holes.whole:
            # Committed commands list the buffer, used or not.
            self.queue.finish()
            self._arenas.remove(arena)
            self._resources = None
            self.queue.objc.release(arena.buffer)

    def close(self) -> None:
        """Free everything."""
        self._resources = None
        while self._arenas:
            self.queue.objc.release(self._arenas.pop().buffer)

    def _allocate(self, what: str, nbytes: int, size: int, kind: Kind) -> Allocation:
        for arena in self._arenas:
            if arena.kind is kind and (offset := arena.holes.take(size)) is not None:
                return Allocation(arena, offset, nbytes)
        arena = self._new_arena(what, size, kind)
        offset = arena.holes.take(size)
        assert offset is not None
        return Allocation(arena, offset, nbytes)

    def _new_arena(self, what: str, size: int, kind: Kind) -> Arena:
        left = self.available
        most = self.queue.device.max_buffer_bytes
        if size > min(left, most):
            raise OutOfMemory(what, size, self.held, min(left, most))
        requested = self._expected - self._allocated if kind is Kind.MODEL else STEPS_ARENA_BYTES
        if requested <= 0:
            requested = max(self.held // GROWTH, MIN_ARENA_BYTES)
        requested = min(requested, MAX_ARENA_BYTES, left, most) // ALIGNMENT * ALIGNMENT
        nbytes = max(requested, size)
        objc, device = self.queue.objc, self.queue.device.handle
        method = "newBufferWithLength:options:"
        try:
            buffer = objc.made(what, device, method, nbytes, SHARED_TRACKED)
        except NoObject:
            raise OutOfMemory(what, nbytes, self.held, left) from None
        return self._added(buffer, nbytes, kind)

    def _added(self, buffer: Any, nbytes: int, kind: Kind) -> Arena:
        objc = self.queue.objc
        try:
            objc.check(buffer, BUFFER_METHODS)
            contents = objc.ffi.buffer(objc.send(buffer, "contents"), nbytes)
            address = int(objc.send(buffer, "gpuAddress"))
        except BaseException:
            objc.release(buffer)
            raise
        host = np.frombuffer(contents, np.uint8)
        arena = Arena(buffer, address, nbytes, host, Holes(nbytes), kind)
        self._arenas.append(arena)
        self._resources = None
        return arena


def mapped_file(data: Bytes) -> mmap.mmap | None:
    """The mapped file that has an array's bytes contiguously; None where it is other memory."""
    if not data.flags.c_contiguous:
        return None
    base: Any = data
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base if isinstance(base, mmap.mmap) else None
