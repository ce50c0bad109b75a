"""Allocates ranges of a block of memory and tracks the free ones."""

from __future__ import annotations

from bisect import insort


class FreeRanges:
    """The free ranges of a block of ``nbytes`` bytes; at first the whole block is free."""

    def __init__(self, nbytes: int) -> None:
        self._block = (0, nbytes)
        self._ranges = [(0, nbytes)]

    @property
    def free_bytes(self) -> int:
        """The number of free bytes."""
        return sum(end - start for start, end in self._ranges)

    @property
    def all_free(self) -> bool:
        """Whether every byte is free."""
        return self._ranges == [self._block]

    def allocate(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` bytes, the start of the first free range that is large enough;
        None if there is none."""
        for index, (start, end) in enumerate(self._ranges):
            if end - start >= nbytes:
                rest = [(start + nbytes, end)] if start + nbytes < end else []
                self._ranges[index : index + 1] = rest
                return start
        return None

    def free(self, start: int, nbytes: int) -> None:
        """Free ``nbytes`` allocated bytes from offset ``start`` on, and join adjacent free
        ranges."""
        insort(self._ranges, (start, start + nbytes))
        joined: list[tuple[int, int]] = []
        for each in self._ranges:
            if joined and joined[-1][1] == each[0]:
                joined[-1] = (joined[-1][0], each[1])
            else:
                joined.append(each)
        self._ranges = joined
