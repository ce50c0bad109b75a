"""Arenas: device memory in buffers that lie side by side, and the holes in them."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 64 << 10
"""Buffers that share an arena are multiples of so many bytes: what drivers align buffers to."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A VkBuffer over ``nbytes`` of its arena from ``start`` on."""

    handle: Any
    start: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Arena:
    """Memory and the buffers that cover it, more than one where a buffer may not be as large;
    ``host`` are its bytes where the host sees them.

    ``holes`` are its free ranges, (start, end) in order.
    """

    buffers: tuple[Buffer, ...]
    memory: Any
    address: int
    nbytes: int
    host: Bytes | None
    own: bool
    """Whether it is the device's own memory, not the host's."""
    holes: list[tuple[int, int]] = field(default_factory=list)

    def take(self, nbytes: int) -> int | None:
        """The offset of the first hole with room, None when there is none."""
        for place, (start, end) in enumerate(self.holes):
            if end - start >= nbytes:
                rest = [(start + nbytes, end)] if start + nbytes < end else []
                self.holes[place : place + 1] = rest
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Make a range a hole, one with those it touches."""
        insort(self.holes, (start, start + nbytes))
        joined: list[tuple[int, int]] = []
        for hole in self.holes:
            if joined and joined[-1][1] == hole[0]:
                joined[-1] = (joined[-1][0], hole[1])
            else:
                joined.append(hole)
        self.holes = joined

    def at(self, offset: int) -> tuple[Any, int, int]:
        """The buffer that has byte ``offset``, where in it, and how many bytes follow there."""
        buffer = self.buffers[offset // self.buffers[0].nbytes]
        return buffer.handle, offset - buffer.start, buffer.start + buffer.nbytes - offset

    @property
    def empty(self) -> bool:
        """True when nothing lies in it."""
        return self.holes == [(0, self.nbytes)]


def cut(nbytes: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of buffers of at most ``most`` bytes that cover ``nbytes``: one, or all but
    the last of the same size."""
    if nbytes <= most:
        return [(0, nbytes)]
    size = max(most // PIECE_BYTES, 1) * PIECE_BYTES
    return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]
