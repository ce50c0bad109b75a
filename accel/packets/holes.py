"""Which ranges of a block of memory nobody has."""

from __future__ import annotations

from bisect import insort


class Holes:
    """The free ranges of ``nbytes`` bytes, all of them at first."""

    def __init__(self, nbytes: int) -> None:
        self._all = (0, nbytes)
        self._free = [(0, nbytes)]

    @property
    def nbytes(self) -> int:
        """Bytes nobody has."""
        return sum(end - start for start, end in self._free)

    @property
    def whole(self) -> bool:
        """True when nothing is taken."""
        return self._free == [self._all]

    def take(self, nbytes: int) -> int | None:
        """The offset of the first hole with room, None when there is none."""
        for place, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                rest = [(start + nbytes, end)] if start + nbytes < end else []
                self._free[place : place + 1] = rest
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Make a range a hole, one with those it touches."""
        insort(self._free, (start, start + nbytes))
        joined: list[tuple[int, int]] = []
        for hole in self._free:
            if joined and joined[-1][1] == hole[0]:
                joined[-1] = (joined[-1][0], hole[1])
            else:
                joined.append(hole)
        self._free = joined
