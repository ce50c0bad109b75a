"""Arenas: device memory in buffers that lie side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.packets.holes import Holes

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
    """

    buffers: tuple[Buffer, ...]
    memory: Any
    address: int
    nbytes: int
    host: Bytes | None
    own: bool
    """Whether it is the device's own memory, not the host's."""
    holes: Holes

    def at(self, offset: int) -> tuple[Any, int, int]:
        """The buffer that has byte ``offset``, where in it, and how many bytes follow there."""
        buffer = self.buffers[offset // self.buffers[0].nbytes]
        return buffer.handle, offset - buffer.start, buffer.start + buffer.nbytes - offset


def cut(nbytes: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of buffers of at most ``most`` bytes that cover ``nbytes``: one, or all but
    the last of the same size."""
    if nbytes <= most:
        return [(0, nbytes)]
    size = max(most // PIECE_BYTES, 1) * PIECE_BYTES
    return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]
