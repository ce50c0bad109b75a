"""Tracks the free ranges of a block of memory."""

from __future__ import annotations

from bisect import insort


class Holes:
    """The free ranges of ``nbytes`` bytes; at first all are free."""

    def __init__(self, nbytes: int) -> None:
        self._all = (0, nbytes)
        self._free = [(0, nbytes)]

    @property
    def nbytes(self) -> int:
        """The number of free bytes."""
        return sum(end - start for start, end in self._free)

    @property
    def whole(self) -> bool:
        """True when every byte is free."""
        return self._free == [self._all]

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` bytes from the first large enough hole, None if there is
        none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                rest = [(start + nbytes, end)] if start + nbytes < end else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a range and join it with the free ranges it touches."""
        insort(self._free, (start, start + nbytes))
        joined: list[tuple[int, int]] = []
        for hole in self._free:
            if joined and joined[-1][1] == hole[0]:
                joined[-1] = (joined[-1][0], hole[1])
            else:
                joined.append(hole)
        self._free = joined
