"""Device memory behind 64-bit addresses: host arrays where the device shares them, else buffers.

Either way an address is a number a packet can hold. Memory that the host mapped is kept in step
with the device around every submission.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Protocol

import numpy as np

from accel.packets.host_memory import AddressRange, aligned_bytes, check_fits
from accel.packets.packet import BANK_SHIFT, BANKS, aligned
from accel.packets.staging_buffers import Bytes, StagingBuffers
from contract.errors import OutOfMemory
from contract.lazy_dataclass import dataclass

MIN_BANK_BYTES = 64 << 20


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

    def allocate(self, what: str, nbytes: int, *, zeroed: bool = True) -> AddressRange:
        """Memory that is zeroed unless told otherwise. Raises OutOfMemory naming ``what``."""

    def adopt(self, what: str, data: Bytes, *, borrowed: bool = False) -> AddressRange:
        """Read-only memory holding ``data``: a view where the device reads host memory.

        ``borrowed`` says that ``data`` is not for this memory alone.
        """

    def map(self, allocation: AddressRange) -> Bytes:
        """The bytes in host memory, from now on exchanged as the allocation says."""

    def read(self, allocation: AddressRange, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes."""

    def write(self, allocation: AddressRange, offset: int, data: Bytes) -> None:
        """Replace some of the bytes."""

    def free(self, allocation: AddressRange) -> None:
        """Give the memory back."""

    def arguments(self) -> tuple[Any, ...]:
        """The buffers every kernel takes."""

    def to_device(self) -> list[Any]:
        """Enqueue the transfer of what the host may have written; the events of it.

        An event given up waits for its transfer.
        """

    def to_host(self) -> list[Any]:
        """Enqueue the transfer of what the device may have written; the events of it."""


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
    _staging: StagingBuffers[AddressRange, Any] = field(init=False)
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

    def allocate(self, what: str, nbytes: int, *, zeroed: bool = True) -> AddressRange:
        """See Memory."""
        allocation = self._take(what, nbytes)
        if zeroed:
            self._fill_zero(allocation)
        return allocation

    def adopt(self, what: str, data: Bytes, *, borrowed: bool = False) -> AddressRange:
        """See Memory."""
        allocation = self._take(what, data.nbytes)
        if data.nbytes:
            self.transfer(allocation, np.ascontiguousarray(data).reshape(-1), to_device=True).wait()
        return allocation

    def map(self, allocation: AddressRange) -> Bytes:
        """See Memory."""
        return self._staging.map(allocation)

    def read(self, allocation: AddressRange, offset: int, nbytes: int) -> Bytes:
        """See Memory."""
        return self._staging.read(allocation, offset, nbytes)

    def write(self, allocation: AddressRange, offset: int, data: Bytes) -> None:
        """See Memory."""
        self._staging.write(allocation, offset, data)

    def free(self, allocation: AddressRange) -> None:
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

    def _take(self, what: str, nbytes: int) -> AddressRange:
        size = aligned(nbytes)
        check_fits(what, nbytes, self.used, self.capacity)
        number = self._bank_with(what, size)
        bank = self._banks[number]
        assert bank is not None
        allocation = AddressRange(number << BANK_SHIFT | bank.used, nbytes, None, number)
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
