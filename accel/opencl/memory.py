"""Device memory with 64-bit addresses, which packets hold.

A device that reads host memory uses host arrays (``host_memory.py``). For another one this module
has a few large OpenCL buffers, the banks. Memory that the host has mapped is copied to the device
before, and from the device after, every submission."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Protocol

import numpy as np

from accel.packets.host_memory import AddressRange, aligned_bytes, check_fits
from accel.packets.packet import BANK_SHIFT, BANKS, aligned
from accel.packets.staging_buffers import StagedMemory
from accel.packets.tier import DeviceMemory
from contract.arrays import Bytes
from contract.errors import OutOfMemory
from contract.lazy_dataclass import dataclass

MIN_BANK_BYTES = 64 << 20


class Memory(DeviceMemory[AddressRange], Protocol):
    """The interface of both kinds of memory. Sizes are in bytes."""

    used: int
    version: int
    """A number that changes whenever ``arguments`` changes."""
    shared: ClassVar[bool]
    """Whether the device reads host memory, so that ``adopt`` copies nothing."""

    def expect(self, nbytes: int) -> None:
        """Prepare for allocations of ``nbytes`` aligned bytes in total."""

    def allocate(self, purpose: str, nbytes: int, *, zeroed: bool = True) -> AddressRange:
        """Memory that is zeroed by default. Raises OutOfMemory naming ``purpose``."""

    def adopt(self, purpose: str, data: Bytes, *, borrowed: bool = False) -> AddressRange:
        """Read-only memory with the bytes of ``data``, a view if the device reads host memory.
        Raises OutOfMemory naming ``purpose``.

        ``borrowed`` says that the caller keeps ``data`` anyway."""

    def arguments(self) -> tuple[Any, ...]:
        """The buffers that every kernel has as arguments."""

    def to_device(self) -> list[Any]:
        """Enqueue copies of all bytes that the host may have written; returns their events.

        An event that is deleted waits for its copy."""

    def to_host(self) -> list[Any]:
        """Enqueue copies of all bytes that the device may have written; returns their events."""


@dataclass(slots=True)
class _Bank:
    """A buffer. Allocations follow each other: ``used`` is the offset of the next one in bytes, and
    ``live`` the number that are not freed. A bank is released as a whole."""

    buffer: Any
    nbytes: int
    on_host: bool = False
    used: int = 0
    live: int = 0


@dataclass(slots=True)
class BankedMemory(StagedMemory[AddressRange, Any]):
    """Memory in up to BANKS buffers of the device; an address is a bank number and an offset.

    ``capacity`` is the most device memory in bytes, ``used`` the bytes of all allocations in it. A
    new bank has room for all bytes that are still expected. If none are, it is as large as all
    banks before it, so that few banks are needed. Memory of the host has banks of its own, which do
    not count as the device's."""

    cl: Any
    context: Any
    queue: Any
    capacity: int
    max_bank_bytes: int
    used: int = 0
    version: int = 0
    _banks: list[_Bank | None] = field(default_factory=lambda: [None] * BANKS)
    _used_aligned: int = 0
    _expected: int = 0
    _expected_on_host: int = 0
    _mapped: list[AddressRange] = field(default_factory=list)
    shared: ClassVar[bool] = False

    @property
    def held(self) -> int:
        return sum(b.nbytes for b in self._banks if b is not None and not b.on_host)

    @property
    def available(self) -> int:
        return self.capacity - self.held

    def expect(self, nbytes: int) -> None:
        self._expected = self._used_aligned + nbytes

    def allocate(self, purpose: str, nbytes: int, *, zeroed: bool = True) -> AddressRange:
        allocation = self._take(purpose, nbytes)
        if zeroed:
            self._fill_zero(allocation)
        return allocation

    def expect_on_host(self, nbytes: int) -> None:
        """Prepare for ``allocate_on_host`` of ``nbytes`` aligned bytes in total."""
        self._expected_on_host = nbytes

    def allocate_on_host(self, purpose: str, nbytes: int) -> AddressRange:
        """Host memory that the device reads and writes. Raises OutOfMemory naming ``purpose``."""
        size = aligned(nbytes)
        number = self._first_with(size, on_host=True)
        if number is None:
            requested = max(min(self._expected_on_host, self.max_bank_bytes), size)
            number = self._new_bank(purpose, size, requested, on_host=True)
        self._expected_on_host -= size
        return self._range_in(number, nbytes)

    def adopt(self, purpose: str, data: Bytes, *, borrowed: bool = False) -> AddressRange:
        allocation = self._take(purpose, data.nbytes)
        if data.nbytes:
            self.transfer(allocation, np.ascontiguousarray(data).reshape(-1), to_device=True).wait()
        return allocation

    def free(self, allocation: AddressRange) -> None:
        self._forget(allocation)
        bank = self._banks[allocation.bank]
        assert bank is not None
        if not bank.on_host:
            self.used -= allocation.nbytes
            self._used_aligned -= aligned(allocation.nbytes)
        bank.live -= 1
        if bank.live == 0:
            bank.buffer.release()
            self._banks[allocation.bank] = None
            self.version += 1

    def arguments(self) -> tuple[Any, ...]:
        return tuple(bank.buffer if bank is not None else None for bank in self._banks)

    def _take(self, purpose: str, nbytes: int) -> AddressRange:
        size = aligned(nbytes)
        check_fits(purpose, nbytes, self.used, self.capacity)
        number = self._first_with(size)
        if number is None:
            number = self._new_bank(purpose, size, self._bank_bytes(size))
        self.used += nbytes
        self._used_aligned += size
        return self._range_in(number, nbytes)

    def _range_in(self, number: int, nbytes: int) -> AddressRange:
        """The next ``nbytes`` of a bank that has room for them."""
        bank = self._banks[number]
        assert bank is not None
        allocation = AddressRange(number << BANK_SHIFT | bank.used, nbytes, None, number)
        bank.used += aligned(nbytes)
        bank.live += 1
        return allocation

    def _first_with(self, size: int, on_host: bool = False) -> int | None:
        """The first bank with room for ``size`` bytes."""
        for number, bank in enumerate(self._banks):
            if bank is not None and bank.on_host == on_host and bank.nbytes - bank.used >= size:
                return number
        return None

    def _bank_bytes(self, size: int) -> int:
        """Bytes of a new bank of the device that has room for ``size``."""
        existing = self.held
        requested = self._expected - self._used_aligned
        if requested <= 0 and existing:
            requested = max(existing, MIN_BANK_BYTES)
        return max(min(requested, self.capacity - existing, self.max_bank_bytes), size)

    def _new_bank(self, purpose: str, size: int, nbytes: int, on_host: bool = False) -> int:
        """The number of a new bank. Raises OutOfMemory."""
        free = [number for number, bank in enumerate(self._banks) if bank is None]
        if not free or nbytes > self.max_bank_bytes:
            raise OutOfMemory(purpose, size, self.used, min(self.max_bank_bytes, self.capacity))
        flags = self.cl.READ_WRITE | (self.cl.ALLOC_HOST_PTR if on_host else 0)
        try:
            buffer = self.cl.Buffer(self.context, flags, nbytes)
        except self.cl.Error:
            left = 0 if on_host else self.capacity - self.used
            raise OutOfMemory(purpose, size, self.used, left) from None
        self._banks[free[0]] = _Bank(buffer, nbytes, on_host)
        self.version += 1
        return free[0]

    def _host_memory(self, nbytes: int) -> Bytes:
        return aligned_bytes(nbytes)

    def _fill_zero(self, allocation: AddressRange) -> None:
        bank = self._banks[allocation.bank]
        assert bank is not None
        offset = allocation.address & ((1 << BANK_SHIFT) - 1)
        size = aligned(allocation.nbytes)
        # NVIDIA's driver faults on fills with a one-byte pattern 2 to 4 GiB into a buffer.
        pattern = np.zeros(4, np.uint32)
        self.cl.enqueue_fill_buffer(self.queue, bank.buffer, pattern, offset, size)

    def transfer(
        self, allocation: AddressRange, host: Bytes, to_device: bool, first: int = 0
    ) -> Any:
        """Enqueue a copy between ``host`` and the allocation at its byte ``first``.

        Returns the event, which waits for the copy when it is deleted."""
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
