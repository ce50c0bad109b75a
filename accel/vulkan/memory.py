"""Device memory: ranges of a few large arenas, each with a 64-bit address.

A device that shares the host's memory has arenas that the host can access. Any other device has its
own memory, accessed through two staging buffers, and host memory that both can access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.packets.arenas import Arena, ArenaKind, ArenaRange, MirroredMemory
from accel.vulkan.api import VulkanError, is_out_of_memory
from accel.vulkan.device import MEMORY_BUDGET
from accel.vulkan.queue import Queue
from contract.arrays import Bytes
from contract.errors import DeviceLost, OutOfMemory, TierError

WHOLE_SIZE = (1 << 64) - 1
ZERO = 0
PIECE_BYTES = 64 << 10
"""Alignment of buffers that share memory, the largest that drivers need."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A VkBuffer over ``nbytes`` bytes of its memory, from byte ``start`` on."""

    handle: Any
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory and the buffers that cover it: several where one buffer may not be as large."""

    buffers: tuple[Buffer, ...]
    memory: Any

    def at(self, offset: int) -> tuple[Any, int, int]:
        """The buffer with byte ``offset``, the offset in that buffer, and the bytes that follow
        there."""
        buffer = self.buffers[offset // self.buffers[0].nbytes]
        return buffer.handle, offset - buffer.start, buffer.start + buffer.nbytes - offset


def split_buffer(nbytes: int, limit: int) -> list[tuple[int, int]]:
    """Offsets and sizes of buffers of at most ``limit`` bytes that cover ``nbytes``; all but the
    last have the same size."""
    if nbytes <= limit:
        return [(0, nbytes)]
    size = max(limit // PIECE_BYTES, 1) * PIECE_BYTES
    return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]


Allocation = ArenaRange[Buffers]


class Memory(MirroredMemory[Buffers]):
    """See MirroredMemory. With ``shared`` device and host use the same memory."""

    def __init__(self, queue: Queue, capacity: int, shared: bool) -> None:
        super().__init__(capacity, queue.device.max_buffer_bytes)
        self.queue = queue
        self.shared = shared
        self._properties = queue.vulkan.structure("PhysicalDeviceMemoryProperties2")
        queue.vulkan.run(
            "GetPhysicalDeviceMemoryProperties2", queue.device.handle, self._properties
        )

    @property
    def available(self) -> int:
        """Bytes that can still be allocated from the device."""
        budget = self._budget()
        return self._limit() if budget is None else max(0, min(self._limit(), budget))

    @contextmanager
    def guarded(self, purpose: str, nbytes: int = 0) -> Iterator[None]:
        try:
            yield
        except VulkanError as error:
            vulkan = self.queue.vulkan
            if is_out_of_memory(vulkan, error):
                name = f"{purpose} ({error})"
                raise OutOfMemory(name, nbytes, self.held, self.available) from None
            message = f"{self.queue.device.name}: {purpose}: {error}"
            if error.result == vulkan.constant("ERROR_DEVICE_LOST"):
                raise DeviceLost(message) from None
            raise TierError(message) from None

    def copy(
        self, source: Allocation, first: int, target: Allocation, offset: int, nbytes: int
    ) -> int:
        """See MirroredMemory: the number is that of the submission."""
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
            read, start, left = source.arena.handle.at(source.offset + first + done)
            written, at, room = target.arena.handle.at(target.offset + offset + done)
            count = min(left, room, nbytes - done)
            region = vulkan.structure("BufferCopy", srcOffset=start, dstOffset=at, size=count)
            vulkan.run("CmdCopyBuffer", commands, read, written, 1, region)
            done += count

    def _await_copy(self, number: int) -> None:
        self.queue.await_number(number)

    def _finish(self) -> None:
        self.queue.finish()

    def _limit(self) -> int:
        """See ArenaMemory: several buffers cover an arena that is larger than one may be."""
        return self.capacity - self.held

    def _release(self, arena: Arena[Buffers]) -> None:
        arena.host = None
        self._give_back(arena.handle.buffers, arena.handle.memory)

    def _zero(self, allocation: Allocation, size: int) -> None:
        if allocation.host is not None:
            allocation.host[:] = 0
            return

        def fill(commands: Any) -> None:
            done = 0
            while done < size:
                buffer, start, room = allocation.arena.handle.at(allocation.offset + done)
                count = min(room, size - done)
                self.queue.vulkan.run("CmdFillBuffer", commands, buffer, start, count, ZERO)
                done += count

        self.queue.run_once(fill)

    def _create(self, purpose: str, nbytes: int, kind: ArenaKind) -> Arena[Buffers]:
        """See ArenaMemory. Raises OutOfMemory if the device gives the buffers of one memory
        addresses that are not consecutive."""
        own, left = kind is ArenaKind.MODEL, self._limit()
        vulkan, device = self.queue.vulkan, self.queue.handle
        memory = vulkan.ffi.NULL
        buffers: list[Buffer] = []
        try:
            allowed, end = ~0, 0
            for start, size in split_buffer(nbytes, self.queue.device.max_buffer_bytes):
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
            raise OutOfMemory(purpose, nbytes, self.held, min(left, self._largest))
        return Arena(Buffers(tuple(buffers), memory), addresses[0], nbytes, kind, host)

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
