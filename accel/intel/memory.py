"""Memory of one device and of its host, through allocations of Level Zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from accel.intel.api import LevelZeroError
from accel.intel.queue import Queue
from accel.packets.arenas import Arena, ArenaKind, ArenaRange, MirroredMemory
from accel.packets.packet import BANK_SHIFT
from contract.errors import OutOfMemory, TierError

PAGE_BYTES = 64 << 10
"""Alignment of arenas, which no device exceeds."""

Allocation = ArenaRange[None]


class Memory(MirroredMemory[None]):
    """See MirroredMemory. The driver knows an arena by its address."""

    def __init__(self, queue: Queue, capacity: int) -> None:
        super().__init__(capacity, queue.device.max_buffer_bytes)
        self.queue = queue

    @contextmanager
    def guarded(self, purpose: str, nbytes: int = 0) -> Iterator[None]:
        try:
            yield
        except LevelZeroError as error:
            if error.is_out_of_memory:
                name = f"{purpose} ({error})"
                raise OutOfMemory(name, nbytes, self.held, self.available) from None
            raise TierError(f"{self.queue.device.name}: {purpose}: {error}") from None

    def copy(
        self, source: Allocation, first: int, target: Allocation, offset: int, nbytes: int
    ) -> int:
        """Copy bytes after everything submitted has ended, and wait for it."""
        if nbytes:
            cast = self.queue.zero.ffi.cast
            pointers = (target.address + offset, source.address + first)
            self.queue.run("MemoryCopy", *(cast("void *", at) for at in pointers), nbytes)
        return 0

    def _await_copy(self, number: int) -> None:
        """Do nothing: ``copy`` waited."""

    def _finish(self) -> None:
        # Kernels may access every allocation of the context until they have ended.
        self.queue.finish()

    def _zero(self, allocation: Allocation, size: int) -> None:
        if allocation.host is not None:
            allocation.host[:] = 0
            return
        ffi = self.queue.zero.ffi
        pointer, zero = ffi.cast("void *", allocation.address), ffi.new("uint32_t *", 0)
        self.queue.run("MemoryFill", pointer, zero, 4, size)

    def _create(self, purpose: str, nbytes: int, kind: ArenaKind) -> Arena[None]:
        zero, queue = self.queue.zero, self.queue
        ffi: Any = zero.ffi
        pointer = ffi.new("void **")
        host = None
        if kind is ArenaKind.HOST:
            description = zero.structure("host_mem_alloc_desc")
            zero.call("MemAllocHost", queue.context, description, nbytes, PAGE_BYTES, pointer)
            host = np.frombuffer(ffi.buffer(pointer[0], nbytes), np.uint8)
        else:
            description = zero.structure("device_mem_alloc_desc")
            arguments = description, nbytes, PAGE_BYTES, queue.device.handle, pointer
            zero.call("MemAllocDevice", queue.context, *arguments)
        address = int(ffi.cast("uintptr_t", pointer[0]))
        arena = Arena(None, address, nbytes, kind, host)
        if address + nbytes > 1 << BANK_SHIFT:
            self._release(arena)
            raise TierError(f"{purpose}: the address {address:#x} has more than {BANK_SHIFT} bits")
        return arena

    def _release(self, arena: Arena[None]) -> None:
        zero = self.queue.zero
        zero.call("MemFree", self.queue.context, zero.ffi.cast("void *", arena.address))
