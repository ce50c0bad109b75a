"""Device memory behind 64-bit addresses: host arrays where the device shares them, else buffers.

Either way an address is a number a packet can hold. Memory that the host mapped is kept in step
with the device around every submission.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Protocol

import numpy as np

from accel.opencl.host_memory import available_memory
from accel.packets.packet import ALIGNMENT, BANK_SHIFT, BANKS, aligned
from accel.packets.staging_buffers import Bytes, StagingBuffers
from contract.errors import OutOfMemory
from contract.lazy_dataclass import dataclass

MIN_BANK_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` at ``address``, see ``staging.Staged``. ``borrowed`` are bytes that are not the
    memory's own: a view of the caller's.
    """

    address: int
    nbytes: int
    host: Bytes | None = None
    bank: int = 0
    sent: bool = True
    fetched: bool = True
    borrowed: bool = False


class Memory(Protocol):
    """What the tier needs of either kind of memory. Sizes in bytes."""

    used: int
    version: int
    """Changes whenever ``arguments`` does."""
    shared: ClassVar[bool]
    """Whether the device reads host memory, so that ``adopt`` copies nothing."""

    @property
    def held(self) -> int:
        """Bytes taken from the device, those included that nothing uses yet."""

    @property
    def available(self) -> int:
        """Bytes that can still be taken, as far as one can tell."""

    def expect(self, nbytes: int) -> None:
        """Allocations of so many bytes in all, aligned, are about to follow."""

    def allocate(self, what: str, nbytes: int, *, zeroed: bool = True) -> Allocation:
        """Memory that is zeroed unless told otherwise. Raises OutOfMemory naming ``what``."""

    def adopt(self, what: str, data: Bytes, *, borrowed: bool = False) -> Allocation:
        """Read-only memory holding ``data``: a view where the device reads host memory.

        ``borrowed`` says that ``data`` is not for this memory alone.
        """

    def map(self, allocation: Allocation) -> Bytes:
        """The bytes in host memory, from now on exchanged as the allocation says."""

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes."""

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """Replace some of the bytes."""

    def free(self, allocation: Allocation) -> None:
        """Give the memory back."""

    def arguments(self) -> tuple[Any, ...]:
        """The buffers every kernel takes."""

    def to_device(self) -> list[Any]:
        """Enqueue the transfer of what the host may have written; the events of it.

        An event given up waits for its transfer.
        """

    def to_host(self) -> list[Any]:
        """Enqueue the transfer of what the device may have written; the events of it."""


def _check_fits(what: str, nbytes: int, used: int, capacity: int) -> None:
    if nbytes > capacity - used:
        raise OutOfMemory(what, nbytes, used, capacity - used)


def aligned_bytes(nbytes: int, *, zeroed: bool = True) -> Bytes:
    """Host bytes that begin at a multiple of ALIGNMENT.

    numpy asks for huge pages where it does not zero, which halves the time of filling them.
    """
    memory = (np.zeros if zeroed else np.empty)(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class SharedMemory:
    """For devices that dereference host addresses: nothing is ever copied."""

    shared: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.version = 0
        self._borrowed = 0

    @property
    def held(self) -> int:
        """See Memory."""
        return self.used - self._borrowed

    @property
    def available(self) -> int:
        """See Memory."""
        return min(self.capacity - self.used, available_memory())

    def expect(self, nbytes: int) -> None:
        """See Memory."""

    def allocate(self, what: str, nbytes: int, *, zeroed: bool = True) -> Allocation:
        """See Memory."""
        _check_fits(what, nbytes, self.used, self.capacity)
        data = aligned_bytes(nbytes, zeroed=zeroed)
        self.used += nbytes
        return Allocation(data.ctypes.data, nbytes, data)

    def adopt(self, what: str, data: Bytes, *, borrowed: bool = False) -> Allocation:
        """See Memory."""
        _check_fits(what, data.nbytes, self.used, self.capacity)
        data = np.ascontiguousarray(data)
        self.used += data.nbytes
        self._borrowed += data.nbytes * borrowed
        return Allocation(data.ctypes.data, data.nbytes, data, borrowed=borrowed)

    def map(self, allocation: Allocation) -> Bytes:
        """See Memory."""
        assert allocation.host is not None
        return allocation.host

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """See Memory."""
        return self.map(allocation)[offset : offset + nbytes].copy()

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """See Memory."""
        self.map(allocation)[offset : offset + data.nbytes] = data

    def free(self, allocation: Allocation) -> None:
        """See Memory."""
        self.used -= allocation.nbytes
        self._borrowed -= allocation.nbytes * allocation.borrowed

    def arguments(self) -> tuple[Any, ...]:
        """See Memory."""
        return ()

    def to_device(self) -> list[Any]:
        """See Memory."""
        return []

    def to_host(self) -> list[Any]:
        """See Memory."""
        return []


@dataclass(slots=True)
class _Bank:
    buffer: Any
    nbytes: int
    used: int = 0
    live: int = 0


@dataclass(slots=True)
class BankedMemory:
    """For other devices: up to BANKS buffers, an address being a bank and an offset in it.

    A new bank holds all that is still expected. Where nothing is, it is as large as all before it,
    so that few are needed whatever is asked for.
    """

    cl: Any
    context: Any
    queue: Any
    capacity: int
    max_bank_bytes: int
    used: int = 0
    version: int = 0
    _banks: list[_Bank | None] = field(default_factory=lambda: [None] * BANKS)
    _placed: int = 0
    _expected: int = 0
    _staging: StagingBuffers[Allocation, Any] = field(init=False)
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._staging = StagingBuffers(self.transfer, aligned_bytes)

    @property
    def held(self) -> int:
        """See Memory."""
        return sum(bank.nbytes for bank in self._banks if bank is not None)

    @property
    def available(self) -> int:
        """See Memory."""
        return self.capacity - self.held

    def expect(self, nbytes: int) -> None:
        """See Memory."""
        self._expected = self._placed + nbytes

    def allocate(self, what: str, nbytes: int, *, zeroed: bool = True) -> Allocation:
        """See Memory."""
        allocation = self._take(what, nbytes)
        if zeroed:
            self._fill_zero(allocation)
        return allocation

    def adopt(self, what: str, data: Bytes, *, borrowed: bool = False) -> Allocation:
        """See Memory."""
        allocation = self._take(what, data.nbytes)
        if data.nbytes:
            self.transfer(allocation, np.ascontiguousarray(data).reshape(-1), to_device=True).wait()
        return allocation

    def map(self, allocation: Allocation) -> Bytes:
        """See Memory."""
        return self._staging.map(allocation)

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Bytes:
        """See Memory."""
        return self._staging.read(allocation, offset, nbytes)

    def write(self, allocation: Allocation, offset: int, data: Bytes) -> None:
        """See Memory."""
        self._staging.write(allocation, offset, data)

    def free(self, allocation: Allocation) -> None:
        """See Memory."""
        self.used -= allocation.nbytes
        self._placed -= aligned(allocation.nbytes)
        self._staging.forget(allocation)
        bank = self._banks[allocation.bank]
        assert bank is not None
        bank.live -= 1
        if bank.live == 0:
            bank.buffer.release()
            self._banks[allocation.bank] = None
            self.version += 1

    def arguments(self) -> tuple[Any, ...]:
        """See Memory."""
        return tuple(bank.buffer if bank is not None else None for bank in self._banks)

    def to_device(self) -> list[Any]:
        """See Memory."""
        return self._staging.to_device()

    def to_host(self) -> list[Any]:
        """See Memory."""
        return self._staging.to_host()

    def _take(self, what: str, nbytes: int) -> Allocation:
        size = aligned(nbytes)
        _check_fits(what, nbytes, self.used, self.capacity)
        number = self._bank_with(what, size)
        bank = self._banks[number]
        assert bank is not None
        allocation = Allocation(number << BANK_SHIFT | bank.used, nbytes, None, number)
        bank.used += size
        bank.live += 1
        self.used += nbytes
        self._placed += size
        return allocation

    def _bank_with(self, what: str, size: int) -> int:
        for number, bank in enumerate(self._banks):
            if bank is not None and bank.nbytes - bank.used >= size:
                return number
        free = [number for number, bank in enumerate(self._banks) if bank is None]
        existing = self.held
        requested = self._expected - self._placed
        if requested <= 0 and existing:
            requested = max(existing, MIN_BANK_BYTES)
        nbytes = max(min(requested, self.capacity - existing, self.max_bank_bytes), size)
        if not free or nbytes > self.max_bank_bytes:
            raise OutOfMemory(what, size, self.used, min(self.max_bank_bytes, self.capacity))
        try:
            buffer = self.cl.Buffer(self.context, self.cl.READ_WRITE, nbytes)
        except self.cl.Error:
            raise OutOfMemory(what, size, self.used, self.capacity - self.used) from None
        self._banks[free[0]] = _Bank(buffer, nbytes)
        self.version += 1
        return free[0]

    def _fill_zero(self, allocation: Allocation) -> None:
        bank = self._banks[allocation.bank]
        assert bank is not None
        offset = allocation.address & ((1 << BANK_SHIFT) - 1)
        size = aligned(allocation.nbytes)
        # NVIDIA's driver faults on fills with a one-byte pattern 2 to 4 GiB into a buffer.
        pattern = np.zeros(4, np.uint32)
        self.cl.enqueue_fill_buffer(self.queue, bank.buffer, pattern, offset, size)

    def transfer(self, allocation: Allocation, host: Bytes, to_device: bool, first: int = 0) -> Any:
        """Enqueue a copy between ``host`` and the allocation, from its byte ``first`` on; the event
        of it, which waits for its end when it is given up."""
        bank = self._banks[allocation.bank]
        assert bank is not None
        offset = (allocation.address & ((1 << BANK_SHIFT) - 1)) + first
        if to_device:
            return self.cl.enqueue_copy(
                self.queue, bank.buffer, host, dst_offset=offset, is_blocking=False
            )
        return self.cl.enqueue_copy(
            self.queue, host, bank.buffer, src_offset=offset, is_blocking=False
        )
