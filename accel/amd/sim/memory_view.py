"""The memory a simulated GPU sees: one range of addresses, of which pages are mapped."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import TierError

PAGE = 4096

Array = NDArray[Any]


class GpuFault(TierError):
    """What a GPU would answer with an interrupt: an ``address`` that is not mapped, code that
    cannot be executed, a launch that cannot be."""

    def __init__(self, problem: str, address: int = 0) -> None:
        super().__init__(problem)
        self.address = address


class MemoryView:
    """``data`` are bytes from address ``base`` on; ``pages`` says of each 4 KiB whether the GPU may
    use it. The first page is for lanes that take no part."""

    def __init__(self, data: NDArray[np.uint8], base: int) -> None:
        assert base % PAGE == 0
        assert data.nbytes % PAGE == 0
        self.data = data
        self.base = base
        self.words = data.view(np.uint32)
        self.pages = np.zeros(data.nbytes // PAGE, np.bool_)
        self.pages[0] = True
        self._base = np.uint64(base)
        self._known = (0, 0)

    def map(self, address: int, nbytes: int, mapped: bool) -> None:
        """Let the GPU use whole pages from ``address`` on, or no longer."""
        first = (address - self.base) // PAGE
        self.pages[first : first + -(-nbytes // PAGE)] = mapped
        self._known = (0, 0)

    def bytes_at(self, address: int, nbytes: int, what: str) -> NDArray[np.uint8]:
        """Some of the bytes. Raises GpuFault naming ``what`` where they are not all mapped."""
        first = address - self.base
        pages = self.pages[first // PAGE : (first + nbytes - 1) // PAGE + 1]
        if first < PAGE or first + nbytes > self.data.nbytes or not pages.all():
            raise GpuFault(f"{what}: {nbytes} bytes at {address:#x} are not mapped", address)
        return self.data[first : first + nbytes]

    def offsets(self, addresses: Array, nbytes: int, taking_part: Array | None) -> Array:
        """Of uint64 addresses the places in ``data``, 0 for lanes that take no part.

        Raises GpuFault naming the first address that is not mapped.
        """
        places = (addresses - self._base).view(np.int64)
        if taking_part is not None:
            places = np.where(taking_part, places, 0)
        low, high = int(places.min()), int(places.max()) + nbytes
        if not (self._known[0] <= low and high <= self._known[1]):
            self._look(places, low, high, nbytes)
        return places

    def _look(self, places: Array, low: int, high: int, nbytes: int) -> None:
        if low >= 0 and high <= self.data.nbytes:
            first, last = low // PAGE, (high - 1) // PAGE
            if self.pages[first : last + 1].all():
                if low >= PAGE:
                    self._known = first * PAGE, (last + 1) * PAGE
                return
        inside = (places >= 0) & (places + nbytes <= self.data.nbytes)
        ends = np.where(inside, places, 0), np.where(inside, places + nbytes - 1, 0)
        good = inside & self.pages[ends[0] // PAGE] & self.pages[ends[1] // PAGE]
        if not good.all():
            wrong = int(places[~good].flat[0]) + self.base
            address = wrong & (1 << 64) - 1
            raise GpuFault(f"address {address:#x} is not mapped", address)
