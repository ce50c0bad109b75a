"""The memory of a simulated GPU: one range of addresses, of which pages are mapped."""

import numpy as np

from contract.arrays import Array, Bytes
from contract.errors import TierError

PAGE = 4096


class GpuFault(TierError):
    """A fault that a GPU would report by an interrupt: an unmapped ``address``, code that cannot be
    executed, an invalid launch."""

    def __init__(self, problem: str, address: int = 0) -> None:
        super().__init__(problem)
        self.address = address


class MemoryView:
    """``data`` are the bytes from address ``base`` on; ``pages`` says for each 4 KiB whether the
    GPU may access it.

    Lanes that take no part access the first page."""

    def __init__(self, data: Bytes, base: int) -> None:
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
        """Allow the GPU to access whole pages from ``address`` on, or forbid it."""
        first = (address - self.base) // PAGE
        self.pages[first : first + -(-nbytes // PAGE)] = mapped
        self._known = (0, 0)

    def bytes_at(self, address: int, nbytes: int, purpose: str) -> Bytes:
        """Some of the bytes. Raises GpuFault naming ``purpose`` unless all are mapped."""
        first = address - self.base
        pages = self.pages[first // PAGE : (first + nbytes - 1) // PAGE + 1]
        if first < PAGE or first + nbytes > self.data.nbytes or not pages.all():
            raise GpuFault(f"{purpose}: {nbytes} bytes at {address:#x} are not mapped", address)
        return self.data[first : first + nbytes]

    def offsets(self, addresses: Array, nbytes: int, taking_part: Array | None) -> Array:
        """The offsets in ``data`` for uint64 addresses, 0 for lanes that take no part. Raises
        GpuFault naming the first unmapped address."""
        offsets = (addresses - self._base).view(np.int64)
        if taking_part is not None:
            offsets = np.where(taking_part, offsets, 0)
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        if not (self._known[0] <= low and high <= self._known[1]):
            self._check(offsets, low, high, nbytes)
        return offsets

    def _check(self, offsets: Array, low: int, high: int, nbytes: int) -> None:
        if low >= 0 and high <= self.data.nbytes:
            first, last = low // PAGE, (high - 1) // PAGE
            if self.pages[first : last + 1].all():
                if low >= PAGE:
                    self._known = first * PAGE, (last + 1) * PAGE
                return
        inside = (offsets >= 0) & (offsets + nbytes <= self.data.nbytes)
        ends = np.where(inside, offsets, 0), np.where(inside, offsets + nbytes - 1, 0)
        good = inside & self.pages[ends[0] // PAGE] & self.pages[ends[1] // PAGE]
        if not good.all():
            wrong = int(offsets[~good].flat[0]) + self.base
            address = wrong & (1 << 64) - 1
            raise GpuFault(f"address {address:#x} is not mapped", address)
