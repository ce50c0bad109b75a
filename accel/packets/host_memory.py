"""Host memory that ops access by its addresses, and the memory that the machine has left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from accel.packets.packet import ALIGNMENT
from contract.errors import OutOfMemory
from contract.lazy_dataclass import dataclass
from contract.memory_limits import within_limits

if TYPE_CHECKING:
    from contract.arrays import Bytes

MEMORY_INFORMATION = Path("/proc/meminfo")
KIB = 1024


@dataclass(slots=True, eq=False)
class AddressRange:
    """``nbytes`` bytes at a 64-bit address, as packets contain it.

    ``host`` are the bytes if the host can access them. ``bank`` is the number of the device buffer,
    for memory with banks. ``sent`` and ``fetched`` are those of ``staging_buffers.Synced``.
    ``borrowed``: the bytes belong to the caller, such as a view of the model file."""

    address: int
    nbytes: int
    host: Bytes | None = None
    bank: int = 0
    sent: bool = True
    fetched: bool = True
    borrowed: bool = False


def total_memory() -> int:
    """The machine's memory in bytes."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.virtual_memory().total)


def available_memory(source: Path = MEMORY_INFORMATION) -> int:
    """Bytes that this process can take without swapping and within its limits.

    Reads Linux's files; psutil, which supports every system, takes longer to load."""
    return within_limits(_machine_memory(source))


def _machine_memory(source: Path) -> int:
    try:
        lines = source.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.removesuffix("kB")) * KIB
    import psutil

    try:
        return int(psutil.virtual_memory().available)
    except OSError:
        # /proc is not mounted. These pages are free; those of cached files do not count.
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(purpose: str, nbytes: int, used: int, capacity: int) -> None:
    """Raise OutOfMemory naming ``purpose`` unless ``nbytes`` more fit into ``capacity``."""
    if nbytes > capacity - used:
        raise OutOfMemory(purpose, nbytes, used, capacity - used)


def aligned_bytes(nbytes: int, *, zeroed: bool = True) -> Bytes:
    """Host bytes that begin at a multiple of ALIGNMENT.

    Without zeroing, numpy asks for huge pages, which halves the time to fill them."""
    memory = (np.zeros if zeroed else np.empty)(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class SharedMemory:
    """Memory of a tier whose ops access host addresses, so nothing is copied.

    ``used`` and ``capacity`` are in bytes. It is the ``DeviceMemory`` of the native tier and the
    ``Memory`` of OpenCL devices that share the host's memory."""

    shared: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.version = 0
        self._borrowed = 0

    @property
    def held(self) -> int:
        """Bytes taken from the host, without borrowed ones."""
        return self.used - self._borrowed

    @property
    def available(self) -> int:
        """Bytes that can still be taken."""
        return min(self.capacity - self.used, available_memory())

    def expect(self, nbytes: int) -> None:
        """Do nothing: the host's memory needs no preparation for ``nbytes`` to come."""

    def allocate(self, purpose: str, nbytes: int, *, zeroed: bool = True) -> AddressRange:
        """Memory that is zeroed by default. Raises OutOfMemory naming ``purpose``."""
        check_fits(purpose, nbytes, self.used, self.capacity)
        try:
            data = aligned_bytes(nbytes, zeroed=zeroed)
        except MemoryError:
            # A limit of the process (ulimit -v), which no file of the system shows.
            purpose += ", which the system refuses (raise ulimit -v, or take a smaller --context)"
            raise OutOfMemory(purpose, nbytes, self.used, 0) from None
        self.used += nbytes
        return AddressRange(data.ctypes.data, nbytes, data)

    def adopt(self, purpose: str, data: Bytes, *, borrowed: bool = False) -> AddressRange:
        """A view of ``data``; ``borrowed``: the caller keeps the bytes anyway. Raises OutOfMemory
        naming ``purpose``."""
        check_fits(purpose, data.nbytes, self.used, self.capacity)
        data = np.ascontiguousarray(data)
        self.used += data.nbytes
        self._borrowed += data.nbytes * borrowed
        return AddressRange(data.ctypes.data, data.nbytes, data, borrowed=borrowed)

    def map(self, allocation: AddressRange) -> Bytes:
        """The bytes themselves."""
        assert allocation.host is not None
        return allocation.host

    def read(self, allocation: AddressRange, offset: int, nbytes: int) -> Bytes:
        """A copy of some of the bytes."""
        return self.map(allocation)[offset : offset + nbytes].copy()

    def write(self, allocation: AddressRange, offset: int, data: Bytes) -> None:
        """Replace some of the bytes."""
        self.map(allocation)[offset : offset + data.nbytes] = data

    def free(self, allocation: AddressRange) -> None:
        """Free the memory once nothing refers to the range."""
        self.used -= allocation.nbytes
        self._borrowed -= allocation.nbytes * allocation.borrowed

    def arguments(self) -> tuple[Any, ...]:
        """No buffers: kernels take addresses."""
        return ()

    def to_device(self) -> list[Any]:
        """No transfers: the host's writes are visible."""
        return []

    def to_host(self) -> list[Any]:
        """No transfers: the device's writes are visible."""
        return []
