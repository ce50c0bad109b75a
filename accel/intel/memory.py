"""Device memory: ranges of a few large allocations, accessed through staging memory of the host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.intel.api import LevelZeroError
from accel.intel.queue import Queue
from accel.packets.holes import Holes
from accel.packets.packet import ALIGNMENT, BANK_SHIFT, aligned
from contract.errors import OutOfMemory, TierError

MIN_ARENA_BYTES = 64 << 10
MAX_ARENA_BYTES = 1 << 30
"""Largest arena for more than one allocation."""
HOST_ARENA_BYTES = 1 << 20
STAGING_BYTES = 4 << 20
GROWTH = 64
"""An arena for unexpected allocations is this part of all allocated memory."""
PAGE_BYTES = 64 << 10
"""Alignment of arenas, which no device exceeds."""

Bytes = NDArray[np.uint8]


class Kind(Enum):
    """The purpose of an arena."""

    MODEL = auto()
    """Buffers of graphs and what batches keep: memory of the device that a plan counts."""
    STEPS = auto()
    """Inputs of steps in flight, in memory of the device."""
    HOST = auto()
    """Memory of the host that the device can access."""


@dataclass(slots=True, eq=False)
class Arena:
    """One allocation of Level Zero. ``host`` are its bytes where the host can access them,
    ``holes`` its free ranges."""

    address: int
    nbytes: int
    host: Bytes | None
    holes: Holes
    kind: Kind


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` bytes at ``address``, ``offset`` bytes into the arena.

    ``mirror`` is its copy in host memory, None until mapped. A mirror is copied to the device
    before a submission to an idle device if ``sent``, and to the host after every submission if
    ``fetched``.
    """

    arena: Arena
    offset: int
    nbytes: int
    mirror: Allocation | None = None
    sent: bool = True
    fetched: bool = True

    @property
    def address(self) -> int:
        """The address that a packet contains."""
        return self.arena.address + self.offset

    @property
    def host(self) -> Bytes | None:
        """The bytes if the host can access them."""
        whole = self.arena.host
        return None if whole is None else whole[self.offset : self.offset + self.nbytes]

    @property
    def seen(self) -> Bytes:
        """The bytes of memory that the host can access."""
        host = self.host
        assert host is not None
        return host


class Memory:
    """All memory of one device. Sizes in bytes. ``capacity`` is the most it allocates for the
    model."""

    def __init__(self, queue: Queue, capacity: int) -> None:
        self.queue = queue
        self.capacity = capacity
        self._arenas: list[Arena] = []
        self._mapped: list[Allocation] = []
        self._expected = 0
        self._allocated = 0
        self._staging: Allocation | None = None

    @property
    def held(self) -> int:
        """Bytes allocated for the model, unused ones included."""
        return sum(arena.nbytes for arena in self._arenas if arena.kind is Kind.MODEL)

    @property
    def used(self) -> int:
        """Bytes of the device that allocations occupy."""
        arenas = [arena for arena in self._arenas if arena.kind is Kind.MODEL]
        return sum(arena.nbytes - arena.holes.nbytes for arena in arenas)

    @property
    def available(self) -> int:
        """Bytes that can still be allocated for the model."""
        return max(0, self.capacity - self.held)

    def expect(self, nbytes: int) -> None:
        """Reserve room for allocations of ``nbytes`` bytes in all, alignment included."""
        self._expected = self._allocated + nbytes

    def allocate(
        self, what: str, nbytes: int, kind: Kind = Kind.MODEL, *, zeroed: bool = True
    ) -> Allocation:
        """Memory of a kind. Raises OutOfMemory naming its purpose ``what``."""
        size = aligned(nbytes)
        allocation = self._taken(what, nbytes, size, kind)
        self._allocated += size if kind is Kind.MODEL else 0
        if zeroed and allocation.host is not None:
            allocation.host[:] = 0
        elif zeroed:
            ffi = self.queue.zero.ffi
            pointer, zero = ffi.cast("void *", allocation.address), ffi.new("uint32_t *", 0)
            self.queue.run("MemoryFill", pointer, zero, 4, size)
        return allocation

    def adopt(self, what: str, data: Bytes) -> Allocation:
        """Memory of the device with the contents ``data``."""
        allocation = self.allocate(what, data.nbytes, zeroed=False)
        self.write(allocation, 0, data)
        return allocation

    def map(self, allocation: Allocation) -> Bytes:
        """The bytes in host memory, synchronized from now on as the allocation says."""
        if allocation.mirror is None:
            name = "host copy of a buffer"
            allocation.mirror = self.allocate(name, allocation.nbytes, Kind.HOST, zeroed=False)
            self._mapped.append(allocation)
        elif allocation.fetched:
            return allocation.mirror.seen
        self.copy(allocation.address, allocation.mirror.address, allocation.nbytes)
        return allocation.mirror.seen

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes, after everything submitted has ended."""
        if allocation.mirror is not None and allocation.fetched:
            return allocation.mirror.seen[offset : offset + nbytes].copy()
        data = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, STAGING_BYTES):
            part = data[start : start + STAGING_BYTES]
            staging = self._staged()
            self.copy(allocation.address + offset + start, staging.address, part.nbytes)
            part[:] = staging.seen[: part.nbytes]
        return data

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """Replace some of the bytes, after everything submitted has ended."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if allocation.mirror is not None:
            allocation.mirror.seen[offset : offset + flat.nbytes] = flat
        for start in range(0, flat.nbytes, STAGING_BYTES):
            part = flat[start : start + STAGING_BYTES]
            staging = self._staged()
            staging.seen[: part.nbytes] = part
            self.copy(staging.address, allocation.address + offset + start, part.nbytes)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes between addresses, after everything submitted has ended, and wait for it."""
        if nbytes:
            cast = self.queue.zero.ffi.cast
            self.queue.run("MemoryCopy", cast("void *", target), cast("void *", source), nbytes)

    def send_mapped(self) -> None:
        """Copy to the device what the host may have written into mapped memory."""
        for allocation in self._mapped:
            if allocation.sent and allocation.mirror is not None:
                self.copy(allocation.mirror.address, allocation.address, allocation.nbytes)

    def fetched(self) -> list[tuple[int, int, int]]:
        """Source address, target address and bytes of every copy that mapped memory needs after a
        submission."""
        return [
            (mapped.address, mapped.mirror.address, mapped.nbytes)
            for mapped in self._mapped
            if mapped.fetched and mapped.mirror is not None and mapped.nbytes
        ]

    def free(self, allocation: Allocation) -> None:
        """Free the memory, which nothing submitted may still use."""
        arena = allocation.arena
        if arena not in self._arenas:
            return
        if allocation.mirror is not None:
            self._mapped = [mapped for mapped in self._mapped if mapped is not allocation]
            self.free(allocation.mirror)
            allocation.mirror = None
        size = aligned(allocation.nbytes)
        arena.holes.give_back(allocation.offset, size)
        self._allocated -= size if arena.kind is Kind.MODEL else 0
        if arena.holes.whole:
            # Kernels may access every allocation of the context until they have ended.
            self.queue.finish()
            self._arenas.remove(arena)
            self._release(arena)

    def close(self) -> None:
        """Free everything; nothing may be running."""
        while self._arenas:
            self._release(self._arenas.pop())

    def _staged(self) -> Allocation:
        if self._staging is None:
            self._staging = self.allocate("staging memory", STAGING_BYTES, Kind.HOST, zeroed=False)
        return self._staging

    def _taken(self, what: str, nbytes: int, size: int, kind: Kind) -> Allocation:
        for arena in self._arenas:
            if arena.kind is kind and (offset := arena.holes.take(size)) is not None:
                return Allocation(arena, offset, nbytes)
        arena = self._new_arena(what, size, kind)
        offset = arena.holes.take(size)
        assert offset is not None
        return Allocation(arena, offset, nbytes)

    def _new_arena(self, what: str, size: int, kind: Kind) -> Arena:
        left, most = self.available, self.queue.device.max_buffer_bytes
        requested = HOST_ARENA_BYTES
        if kind is Kind.MODEL:
            if size > min(left, most):
                raise OutOfMemory(what, size, self.held, min(left, most))
            requested = self._expected - self._allocated
            if requested <= 0:
                requested = max(self.held // GROWTH, MIN_ARENA_BYTES)
            requested = min(requested, left)
        requested = min(requested, MAX_ARENA_BYTES, most) // ALIGNMENT * ALIGNMENT
        nbytes = max(requested, size)
        try:
            address = self._address(nbytes, kind)
        except LevelZeroError as error:
            if not error.is_out_of_memory:
                raise TierError(f"{what}: {error}") from None
            raise OutOfMemory(f"{what} ({error})", nbytes, self.held, left) from None
        arena = Arena(address, nbytes, self._host_bytes(address, nbytes, kind), Holes(nbytes), kind)
        if address + nbytes > 1 << BANK_SHIFT:
            self._release(arena)
            raise TierError(f"{what}: the address {address:#x} has more than {BANK_SHIFT} bits")
        self._arenas.append(arena)
        return arena

    def _address(self, nbytes: int, kind: Kind) -> int:
        zero, queue = self.queue.zero, self.queue
        pointer = zero.ffi.new("void **")
        if kind is Kind.HOST:
            description = zero.structure("host_mem_alloc_desc")
            zero.call("MemAllocHost", queue.context, description, nbytes, PAGE_BYTES, pointer)
        else:
            description = zero.structure("device_mem_alloc_desc")
            arguments = description, nbytes, PAGE_BYTES, queue.device.handle, pointer
            zero.call("MemAllocDevice", queue.context, *arguments)
        return int(zero.ffi.cast("uintptr_t", pointer[0]))

    def _host_bytes(self, address: int, nbytes: int, kind: Kind) -> Bytes | None:
        if kind is not Kind.HOST:
            return None
        ffi: Any = self.queue.zero.ffi
        return np.frombuffer(ffi.buffer(ffi.cast("char *", address), nbytes), np.uint8)

    def _release(self, arena: Arena) -> None:
        zero = self.queue.zero
        zero.call("MemFree", self.queue.context, zero.ffi.cast("void *", arena.address))
