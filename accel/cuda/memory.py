"""Device memory, and page-locked host memory for copies."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel.cuda.driver import OUT_OF_MEMORY, Context, CudaError
from accel.packets.host_memory import available_memory
from accel.packets.packet import aligned
from accel.packets.staging_buffers import StagedMemory
from contract.arrays import Bytes
from contract.errors import OutOfMemory

PAGE_BYTES = 4096
DEVICE_MAP = 2
"""CU_MEMHOSTREGISTER_DEVICEMAP: kernels may read the memory."""
REFUSED = tuple(
    f"CUDA_ERROR_{name}"
    for name in (
        *("INVALID_VALUE", "OUT_OF_MEMORY", "NOT_PERMITTED", "NOT_SUPPORTED"),
        "HOST_MEMORY_NOT_REGISTERED",
    )
)
"""The driver's errors for host memory that it did not lock."""


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` bytes at ``address`` on the device, see
    ``accel.packets.staging_buffers.Staged``."""

    address: int
    nbytes: int
    host: Bytes | None = None
    sent: bool = True
    fetched: bool = True


@dataclass(slots=True, eq=False)
class HostWeight(Allocation):
    """A weight in page-locked memory ``host``, which kernels may read at ``mapped``. ``address`` is
    a part of the ring, to which steps copy it."""

    mapped: int = 0


_ABANDONED: list[Bytes] = []
"""Memory to which a device that does not answer may still write; it is never freed."""


class Pinned:
    """Page-locked host memory, which the device copies to and from while the host continues.

    Blocks from ``take`` are reused once nothing refers to them. They stay readable after the
    context is destroyed: the memory is the host's own and only registered with the driver. Any
    thread may call ``take``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._free: dict[int, list[Bytes]] = {}
        self._blocks: list[Bytes] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that were ever made."""
        return sum(block.nbytes for block in self._blocks)

    def take(self, nbytes: int) -> Bytes:
        """uint8[nbytes] with undefined contents."""
        size = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = self._make(size)
        block = (ctypes.c_uint8 * nbytes).from_buffer(memory.data)
        weakref.finalize(block, free.append, memory)
        return np.ndarray((nbytes,), np.uint8, buffer=memoryview(block))

    def mapped(self, purpose: str, nbytes: int) -> tuple[Bytes, int]:
        """As ``take``, and the address at which kernels read it. Raises OutOfMemory naming its
        purpose ``purpose`` where the system refuses page-locked memory."""
        try:
            block = self.take(nbytes)
            address = self._context.call("cuMemHostGetDevicePointer", block.ctypes.data, 0)
        except (MemoryError, CudaError) as error:
            if isinstance(error, CudaError) and error.name not in REFUSED:
                raise
            purpose = f"{purpose} in page-locked host memory"
            raise OutOfMemory(purpose, nbytes, self.nbytes, available_memory()) from None
        return block, int(address)

    def zeroed(self, nbytes: int) -> Bytes:
        """As ``take``, all zero."""
        block = self.take(nbytes)
        block[:] = 0
        return block

    def forget(self) -> None:
        """Drop all blocks; the context is gone, and with it the driver's registrations."""
        self._blocks.clear()
        self._free.clear()

    def abandon(self) -> None:
        """Drop all blocks but never free them, since the device may still write to them."""
        _ABANDONED.extend(self._blocks)
        self.forget()

    def _make(self, size: int) -> Bytes:
        memory = np.empty(size + PAGE_BYTES, np.uint8)
        start = -memory.ctypes.data % PAGE_BYTES
        block = memory[start : start + size]
        # Touch every page here: the driver would have them made one after the other, even for
        # several threads.
        block[::PAGE_BYTES] = 0
        # If a sandbox forbids this, copies are slower but still right.
        with suppress(CudaError):
            self._context.call("cuMemHostRegister", block.ctypes.data, size, DEVICE_MAP)
        self._blocks.append(block)
        return block


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy in the order of the stream."""

    memory: Memory

    def wait(self) -> None:
        """Return when the copy and everything before it have ended."""
        self.memory.synchronize()


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one device: one for steps and most copies, one that copies inputs of steps to
    the device, one that copies small outputs to the host, one that copies streamed weights."""

    steps: Any
    inputs: Any
    outputs: Any
    weights: Any


@dataclass(slots=True)
class Memory(StagedMemory[Allocation, "Copy"]):
    """Allocations on one device, at most ``capacity`` bytes in all. Copies run on ``stream``."""

    context: Context
    streams: Streams
    capacity: int
    pinned: Pinned
    held: int = 0
    """Bytes allocated from the device."""
    spare: Callable[[], None] = lambda: None
    """Frees memory that is only held for speed."""
    _mapped: list[Allocation] = field(default_factory=list)

    @property
    def stream(self) -> Any:
        """The stream of steps."""
        return self.streams.steps

    @property
    def available(self) -> int:
        """Bytes that can still be allocated, given what other processes use."""
        free, _ = self.context.call("cuMemGetInfo")
        return max(0, min(int(free), self.capacity - self.held))

    def allocate(self, purpose: str, nbytes: int, *, zeroed: bool = True) -> Allocation:
        """Memory, zeroed unless ``zeroed`` is False. Raises OutOfMemory naming its purpose
        ``purpose``."""
        size = aligned(nbytes)
        address = self._try_allocate(size)
        if address is None:
            self.spare()
            address = self._try_allocate(size)
        if address is None:
            raise OutOfMemory(purpose, nbytes, self.held, self.available)
        self.held += size
        if zeroed:
            self.context.call("cuMemsetD32Async", address, 0, size // 4, self.stream)
        return Allocation(address, nbytes)

    def adopt(self, purpose: str, data: Bytes) -> Allocation:
        """Memory that contains ``data``, which has been read when this returns."""
        allocation = self.allocate(purpose, data.nbytes, zeroed=False)
        if data.nbytes:
            self.transfer(allocation, np.ascontiguousarray(data).reshape(-1), True, 0).wait()
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free memory that nothing uses any more."""
        self._forget(allocation)
        if isinstance(allocation, HostWeight):
            return
        self.held -= aligned(allocation.nbytes)
        if not self.context.closed:
            self.context.call("cuMemFree", allocation.address)

    def transfer(
        self, allocation: Allocation, host: Bytes, to_device: bool, first: int = 0
    ) -> Copy:
        """Enqueue a copy between ``host`` and the allocation, from its byte ``first`` on.

        The copy overlaps with the host where ``host`` is page-locked."""
        there, here = allocation.address + first, host.ctypes.data
        if to_device:
            self.context.call("cuMemcpyHtoDAsync", there, here, host.nbytes, self.stream)
        else:
            self.context.call("cuMemcpyDtoHAsync", here, there, host.nbytes, self.stream)
        return Copy(self)

    def copy_back(self, allocation: Allocation, first: int, nbytes: int) -> None:
        """Enqueue the copy of ``nbytes`` bytes from ``first`` on to a streamed weight's memory."""
        if isinstance(allocation, HostWeight) and allocation.host is not None:
            self.transfer(allocation, allocation.host[first : first + nbytes], False, first)

    def states_to_host(self) -> list[Copy]:
        """Enqueue the part of ``to_host`` for memory that the host may also write."""
        return self._sync([one for one in self._mapped if one.fetched and one.sent], False)

    def outputs_to_host(self, written: Collection[Allocation]) -> None:
        """Enqueue the part of ``to_host`` for the outputs among ``written``, in the order of
        ``streams.outputs``."""
        for one in self._mapped:
            if one.fetched and not one.sent and one in written and one.host is not None:
                here, nbytes = one.host.ctypes.data, one.nbytes
                if nbytes:
                    self.context.quick(
                        "cuMemcpyDtoHAsync", here, one.address, nbytes, self.streams.outputs
                    )

    def synchronize(self) -> None:
        """Return when all streams are empty."""
        for stream in (self.streams.inputs, self.stream, self.streams.outputs):
            self.context.call("cuStreamSynchronize", stream)

    def _host_memory(self, nbytes: int) -> Bytes:
        return self.pinned.zeroed(nbytes)

    def _try_allocate(self, size: int) -> int | None:
        if size > self.capacity - self.held:
            return None
        try:
            return int(self.context.call("cuMemAlloc", size))
        except CudaError as error:
            if error.name != OUT_OF_MEMORY:
                raise
            return None
