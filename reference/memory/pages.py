"""The KV page pool: which physical pages are free, and which a slot's page table names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from contract.records import NO_SLOT, PAGE_META


class PagePool:
    """A fixed number of pages, handed out first freed first reused.

    ``order`` is the order in which the pages are handed out at first; no order changes a result.
    """

    def __init__(self, pages: int, order: Iterable[int] | None = None) -> None:
        self._free = deque(range(pages) if order is None else order)
        self.meta: NDArray[np.void] = np.zeros(pages, PAGE_META)
        self.meta["owner_slot"] = NO_SLOT
        if sorted(self._free) != list(range(pages)):
            raise ValueError("the order names every page once")

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def take(self, count: int, slot: int, tenant: int = 0) -> list[int]:
        """``count`` pages for ``slot``; the caller has checked ``free``."""
        if count > len(self._free):
            raise AssertionError(f"{count} pages asked of {len(self._free)} free ones")
        pages = [self._free.popleft() for _ in range(count)]
        self.meta["ref_count"][pages] = 1
        self.meta["owner_slot"][pages] = slot
        self.meta["tenant"][pages] = tenant
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages to the pool; each must be owned."""
        for page in pages:
            if self.meta["ref_count"][page] != 1:
                raise AssertionError(f"page {page} is not owned")
            self.meta[page] = (0, NO_SLOT, 0, 0)
            self._free.append(page)
