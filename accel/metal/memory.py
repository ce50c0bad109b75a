"""Memory that device and host share: ranges of a few large MTLBuffers, with GPU addresses."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from accel.metal.objc import MetalError, NoObject
from accel.metal.queue import Queue
from accel.packets.arenas import Arena, ArenaKind, ArenaMemory, ArenaRange
from contract.arrays import Bytes
from contract.errors import OutOfMemory, TierError

SHARED_TRACKED = 0
"""MTLResourceOptions: shared storage, the default cache, and hazards tracked by Metal."""
VIEW_BYTES = 1 << 20
"""Fewest bytes of a mapped file that are used without a copy; less is copied, since each step must
name every view as one more buffer."""
BUFFER_METHODS = ("contents", "gpuAddress")

Allocation = ArenaRange[Any]


class Memory(ArenaMemory[Any]):
    """See ArenaMemory. The handle of an arena is its MTLBuffer."""

    def __init__(self, queue: Queue, capacity: int) -> None:
        super().__init__(capacity, queue.device.max_buffer_bytes)
        self.queue = queue
        self._resources: tuple[Any, int] | None = None

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
            buffers = [arena.handle for arena in self._arenas]
            self._resources = self.queue.objc.ffi.new("id[]", buffers), len(buffers)
        return self._resources

    @contextmanager
    def guarded(self, purpose: str, nbytes: int = 0) -> Iterator[None]:
        """See ArenaMemory. A missing object is memory that ran out."""
        try:
            yield
        except NoObject as error:
            raise OutOfMemory(f"{purpose} ({error})", nbytes, self.held, self.available) from None
        except MetalError as error:
            raise TierError(f"{self.queue.device.name}: {purpose}: {error}") from None

    def adopt(self, purpose: str, data: Bytes) -> Allocation:
        """Memory with the contents ``data``: a view of a mapped file if it is large enough, else a
        copy."""
        seen = self.view(data) if data.nbytes >= VIEW_BYTES else None
        return super().adopt(purpose, data) if seen is None else seen

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
        self._arenas.append(self._arena(buffer, nbytes, ArenaKind.VIEW))
        return Allocation(self._arenas[-1], address - start, data.nbytes)

    def free(self, allocation: Allocation) -> None:
        """See ArenaMemory. A view is the only allocation of its arena."""
        arena = allocation.arena
        if arena.kind is not ArenaKind.VIEW:
            super().free(allocation)
        elif arena in self._arenas:
            self._drop(arena)

    def _finish(self) -> None:
        # Committed commands list every buffer, used or not.
        self.queue.finish()

    def _create(self, purpose: str, nbytes: int, kind: ArenaKind) -> Arena[Any]:
        method, device = "newBufferWithLength:options:", self.queue.device.handle
        buffer = self.queue.objc.create(purpose, device, method, nbytes, SHARED_TRACKED)
        return self._arena(buffer, nbytes, kind)

    def _arena(self, buffer: Any, nbytes: int, kind: ArenaKind) -> Arena[Any]:
        objc = self.queue.objc
        try:
            objc.check(buffer, BUFFER_METHODS)
            contents = objc.ffi.buffer(objc.send(buffer, "contents"), nbytes)
            address = int(objc.send(buffer, "gpuAddress"))
        except BaseException:
            objc.release(buffer)
            raise
        self._resources = None
        return Arena(buffer, address, nbytes, kind, np.frombuffer(contents, np.uint8))

    def _release(self, arena: Arena[Any]) -> None:
        self._resources = None
        self.queue.objc.release(arena.handle)


def mapped_file(data: Bytes) -> mmap.mmap | None:
    """The mapped file that has an array's bytes contiguously; None if it is other memory."""
    if not data.flags.c_contiguous:
        return None
    base: Any = data
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base if isinstance(base, mmap.mmap) else None
