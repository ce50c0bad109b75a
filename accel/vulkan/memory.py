"""Device memory: ranges of a few large buffers, each with a 64-bit address.

A device that shares the host's memory has arenas that the host can access. Any other device has its
own memory, accessed through two staging buffers, and host memory that both can access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.packets.holes import Holes
from accel.packets.packet import ALIGNMENT, aligned
from accel.vulkan.api import VulkanError, is_out_of_memory
from accel.vulkan.arena import Arena, Buffer, Bytes, cut
from accel.vulkan.device import MEMORY_BUDGET
from accel.vulkan.queue import Queue
from contract.errors import OutOfMemory, TierError

MIN_ARENA_BYTES = 64 << 10
MAX_ARENA_BYTES = 1 << 30
"""Largest arena for more than one allocation."""
GROWTH = 64
"""An arena for unexpected allocations is this part of all allocated memory."""
HOST_ARENA_BYTES = 1 << 20
STAGING_BYTES = 8 << 20
WHOLE_SIZE = (1 << 64) - 1
ZERO = 0


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


class Memory:
    """All memory of one device. Sizes in bytes.

    With ``shared`` device and host use the same memory. ``exchanges`` changes whenever the result
    of ``staging`` does.
    """

    def __init__(self, queue: Queue, capacity: int, shared: bool) -> None:
        self.queue = queue
        self.capacity = capacity
        self.shared = shared
        self.used = 0
        self._arenas: list[Arena] = []
        self._mapped: list[Allocation] = []
        self.exchanges = 0
        self._expected = 0
        self._allocated = 0
        self._staging: list[tuple[Allocation, int]] = []
        self._staging_bytes = min(STAGING_BYTES, queue.device.max_buffer_bytes)
        self._properties = queue.vulkan.structure("PhysicalDeviceMemoryProperties2")
        queue.vulkan.run(
            "GetPhysicalDeviceMemoryProperties2", queue.device.handle, self._properties
        )

    @property
    def held(self) -> int:
        """Bytes allocated from the device, unused ones included."""
        return sum(arena.nbytes for arena in self._arenas if arena.own)

    @property
    def available(self) -> int:
        """Bytes that can still be allocated from the device."""
        left = self.capacity - self.held
        budget = self._budget()
        return left if budget is None else max(0, min(left, budget))

    def expect(self, nbytes: int) -> None:
        """Reserve room for allocations of ``nbytes`` bytes in all, alignment included."""
        self._expected = self._allocated + nbytes

    def allocate(
        self, what: str, nbytes: int, *, zeroed: bool = True, on_host: bool = False
    ) -> Allocation:
        """The device's own memory or, with ``on_host``, host memory. Raises OutOfMemory naming its
        purpose ``what``."""
        own = not on_host
        size = aligned(nbytes)
        allocation = self._allocate(what, nbytes, size, own)
        self.used += nbytes if own else 0
        self._allocated += size if own else 0
        if zeroed:
            self._zero(allocation, size)
        return allocation

    def adopt(self, what: str, data: Bytes) -> Allocation:
        """The device's own memory with the contents ``data``."""
        allocation = self.allocate(what, data.nbytes, zeroed=False)
        self.write(allocation, 0, data)
        return allocation

    def map(self, allocation: Allocation) -> Bytes:
        """The bytes in host memory, synchronized from now on as the allocation says."""
        if allocation.host is not None:
            return allocation.host
        if allocation.mirror is None:
            allocation.mirror = self.allocate("host mirror", allocation.nbytes, on_host=True)
            self._mapped.append(allocation)
            self.exchanges += 1
        elif allocation.fetched:
            return _seen(allocation.mirror)
        self.read_into(allocation, 0, _seen(allocation.mirror))
        return _seen(allocation.mirror)

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes; for mapped memory from the host copy, which is current."""
        if allocation.mirror is not None and allocation.fetched:
            return _seen(allocation.mirror)[offset : offset + nbytes].copy()
        data = np.empty(nbytes, np.uint8)
        self.read_into(allocation, offset, data)
        return data

    def read_into(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """Fill ``data`` with the bytes from ``offset`` on, after everything submitted has ended."""
        if allocation.host is not None:
            self.queue.finish()
            data[:] = allocation.host[offset : offset + data.nbytes]
            return
        for start in range(0, data.nbytes, self._staging_bytes):
            part = data[start : start + self._staging_bytes]
            staging, _ = self._staged()
            self.copy(allocation, offset + start, staging, 0, part.nbytes)
            self.queue.finish()
            part[:] = _seen(staging)[: part.nbytes]

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """Replace some of the bytes. Where memory is shared nothing submitted may still use them;
        elsewhere the write takes its turn in the order of submissions."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if allocation.mirror is not None:
            _seen(allocation.mirror)[offset : offset + flat.nbytes] = flat
        if allocation.host is not None:
            allocation.host[offset : offset + flat.nbytes] = flat
            return
        for start in range(0, flat.nbytes, self._staging_bytes):
            part = flat[start : start + self._staging_bytes]
            staging, index = self._staged()
            _seen(staging)[: part.nbytes] = part
            number = self.copy(staging, 0, allocation, offset + start, part.nbytes)
            self._staging[index] = staging, number

    def copy(
        self, source: Allocation, first: int, target: Allocation, offset: int, nbytes: int
    ) -> int:
        """Copy bytes in the order of submissions, and return the number of this one."""
        return self.queue.run_once(
            lambda commands: self.record_copy(commands, source, first, target, offset, nbytes)
        )

    def record_copy(
        self,
        commands: Any,
        source: Allocation,
        first: int,
        target: Allocation,
        offset: int,
        nbytes: int,
    ) -> None:
        """Record in ``commands`` a copy of ``nbytes``, from byte ``first`` to byte ``offset``."""
        vulkan = self.queue.vulkan
        done = 0
        while done < nbytes:
            read, start, left = source.arena.at(source.offset + first + done)
            written, at, room = target.arena.at(target.offset + offset + done)
            count = min(left, room, nbytes - done)
            region = vulkan.structure("BufferCopy", srcOffset=start, dstOffset=at, size=count)
            vulkan.run("CmdCopyBuffer", commands, read, written, 1, region)
            done += count

    def free(self, allocation: Allocation) -> None:
        """Free the memory, which no step in flight may still use; copies may."""
        if allocation.arena not in self._arenas:
            return
        if allocation.mirror is not None:
            self._mapped = [mapped for mapped in self._mapped if mapped is not allocation]
            self.exchanges += 1
            self.free(allocation.mirror)
            allocation.mirror = None
        arena, size = allocation.arena, aligned(allocation.nbytes)
        arena.holes.give_back(allocation.offset, size)
        if arena.own:
            self.used -= allocation.nbytes
            self._allocated -= size
        if arena.holes.whole:
            self.queue.finish()
            self._arenas.remove(arena)
            self._destroy(arena)

    def staging(self, to_device: bool) -> list[Allocation]:
        """Mapped memory to be copied before a submission (``to_device``) or after it."""
        return [m for m in self._mapped if (m.sent if to_device else m.fetched)]

    def close(self) -> None:
        """Free everything; the device must be idle."""
        while self._arenas:
            self._destroy(self._arenas.pop())

    def _allocate(self, what: str, nbytes: int, size: int, own: bool) -> Allocation:
        for arena in self._arenas:
            if arena.own == own and (offset := arena.holes.take(size)) is not None:
                return Allocation(arena, offset, nbytes)
        arena = self._new_arena(what, size, own)
        offset = arena.holes.take(size)
        assert offset is not None
        return Allocation(arena, offset, nbytes)

    def _new_arena(self, what: str, size: int, own: bool) -> Arena:
        left = self.capacity - self.held
        most = self.queue.device.max_buffer_bytes
        if own and size > left:
            raise OutOfMemory(what, size, self.held, left)
        requested = self._expected - self._allocated
        if requested <= 0:
            requested = min(max(self.held // GROWTH, MIN_ARENA_BYTES), MAX_ARENA_BYTES)
        requested = min(requested, MAX_ARENA_BYTES, left) if own else HOST_ARENA_BYTES
        try:
            arena = self._created(max(min(requested, most) // ALIGNMENT * ALIGNMENT, size), own)
        except VulkanError as error:
            if not is_out_of_memory(self.queue.vulkan, error):
                raise TierError(f"{what}: {error}") from None
            raise OutOfMemory(f"{what} ({error})", size, self.held, self.available) from None
        if arena is None:
            raise OutOfMemory(what, size, self.held, min(left, most))
        self._arenas.append(arena)
        return arena

    def _created(self, nbytes: int, own: bool) -> Arena | None:
        """None where the device gives the buffers of one memory addresses that are not
        consecutive."""
        vulkan, device = self.queue.vulkan, self.queue.handle
        memory = vulkan.ffi.NULL
        buffers: list[Buffer] = []
        try:
            allowed, end = ~0, 0
            for start, size in cut(nbytes, self.queue.device.max_buffer_bytes):
                buffers.append(Buffer(self._buffer(size), start, size))
                needs = vulkan.ffi.new("VkMemoryRequirements *")
                vulkan.run("GetBufferMemoryRequirements", device, buffers[-1].handle, needs)
                allowed &= needs.memoryTypeBits
                end = start + needs.size
            memory = self._memory(end, self._type(allowed, own))
            addresses = [self._bound(buffer, memory) for buffer in buffers]
            host = self._host_bytes(memory, nbytes) if self.shared or not own else None
        except BaseException:
            self._give_back(buffers, memory)
            raise
        if any(at != addresses[0] + b.start for at, b in zip(addresses, buffers, strict=True)):
            self._give_back(buffers, memory)
            return None
        return Arena(tuple(buffers), memory, addresses[0], nbytes, host, own, Holes(nbytes))

    def _buffer(self, nbytes: int) -> Any:
        vulkan = self.queue.vulkan
        usage = ("TRANSFER_SRC", "TRANSFER_DST", "STORAGE_BUFFER", "SHADER_DEVICE_ADDRESS")
        information = vulkan.structure(
            "BufferCreateInfo", size=nbytes, usage=vulkan.flags("BUFFER_USAGE", *usage)
        )
        return vulkan.create("Buffer", self.queue.handle, information)

    def _bound(self, buffer: Buffer, memory: Any) -> int:
        """Bind a buffer to its bytes of ``memory``, and return its address."""
        vulkan, device = self.queue.vulkan, self.queue.handle
        vulkan.call("BindBufferMemory", device, buffer.handle, memory, buffer.start)
        information = vulkan.structure("BufferDeviceAddressInfo", buffer=buffer.handle)
        return int(vulkan.run("GetBufferDeviceAddress", device, information))

    def _give_back(self, buffers: Sequence[Buffer], memory: Any) -> None:
        vulkan, device = self.queue.vulkan, self.queue.handle
        for buffer in buffers:
            vulkan.run("DestroyBuffer", device, buffer.handle, vulkan.ffi.NULL)
        vulkan.run("FreeMemory", device, memory, vulkan.ffi.NULL)

    def _memory(self, nbytes: int, kind: int) -> Any:
        vulkan = self.queue.vulkan
        flags = vulkan.structure(
            "MemoryAllocateFlagsInfo", flags=vulkan.flags("MEMORY_ALLOCATE", "DEVICE_ADDRESS")
        )
        information = vulkan.structure(
            "MemoryAllocateInfo", pNext=flags, allocationSize=nbytes, memoryTypeIndex=kind
        )
        return vulkan.create("Memory", self.queue.handle, information)

    def _host_bytes(self, memory: Any, nbytes: int) -> Bytes:
        vulkan = self.queue.vulkan
        pointer = vulkan.ffi.new("void **")
        vulkan.call("MapMemory", self.queue.handle, memory, 0, WHOLE_SIZE, 0, pointer)
        return np.frombuffer(vulkan.ffi.buffer(pointer[0], nbytes), np.uint8)

    def _type(self, allowed: int, own: bool) -> int:
        """The memory type with all needed properties and as many desired ones as possible."""
        flags = self.queue.vulkan.flags
        prefix = "MEMORY_PROPERTY"
        seen = flags(prefix, "HOST_VISIBLE", "HOST_COHERENT")
        local, cached = flags(prefix, "DEVICE_LOCAL"), flags(prefix, "HOST_CACHED")
        if own and self.shared:
            needed, wished, shunned = local | seen, cached, 0
        elif own:
            needed, wished, shunned = local, 0, seen
        else:
            needed, wished, shunned = seen, cached, local
        found = []
        memory = self._properties.memoryProperties
        for number in range(memory.memoryTypeCount):
            has = memory.memoryTypes[number].propertyFlags
            if allowed >> number & 1 and has & needed == needed:
                heap = memory.memoryHeaps[memory.memoryTypes[number].heapIndex]
                found.append((bool(has & shunned), not has & wished, -heap.size, number))
        if not found:
            raise TierError(f"{self.queue.device.name} has no memory for buffers")
        return min(found)[-1]

    def _destroy(self, arena: Arena) -> None:
        arena.host = None
        self._give_back(arena.buffers, arena.memory)

    def _zero(self, allocation: Allocation, size: int) -> None:
        if allocation.host is not None:
            allocation.host[:] = 0
            return

        def fill(commands: Any) -> None:
            done = 0
            while done < size:
                buffer, start, room = allocation.arena.at(allocation.offset + done)
                count = min(room, size - done)
                self.queue.vulkan.run("CmdFillBuffer", commands, buffer, start, count, ZERO)
                done += count

        self.queue.run_once(fill)

    def _staged(self) -> tuple[Allocation, int]:
        """A staging buffer that no submission uses any more, and its number."""
        if not self._staging:
            size = self._staging_bytes
            buffers = [self.allocate("staging", size, on_host=True) for _ in range(2)]
            self._staging = [(buffer, 0) for buffer in buffers]
        index = min(range(len(self._staging)), key=lambda n: self._staging[n][1])
        staging, number = self._staging[index]
        self.queue.await_number(number)
        return staging, index

    def _budget(self) -> int | None:
        """The bytes that the driver reports as available in the device's largest heap, if it
        does."""
        if MEMORY_BUDGET not in self.queue.device.extensions:
            return None
        vulkan = self.queue.vulkan
        budget = vulkan.structure("PhysicalDeviceMemoryBudgetPropertiesEXT")
        found = vulkan.structure("PhysicalDeviceMemoryProperties2", pNext=budget)
        vulkan.run("GetPhysicalDeviceMemoryProperties2", self.queue.device.handle, found)
        memory = found.memoryProperties
        local = vulkan.flags("MEMORY_HEAP", "DEVICE_LOCAL")
        heaps = [
            (int(memory.memoryHeaps[i].size), i)
            for i in range(memory.memoryHeapCount)
            if memory.memoryHeaps[i].flags & local
        ]
        heap = max(heaps)[1]
        return int(budget.heapBudget[heap]) - int(budget.heapUsage[heap])


def _seen(allocation: Allocation) -> Bytes:
    host = allocation.host
    assert host is not None
    return host
