"""Arenas: device memory covered by consecutive buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.packets.holes import Holes

PIECE_BYTES = 64 << 10
"""Alignment of buffers that share an arena, the largest that drivers need."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A VkBuffer over ``nbytes`` bytes of its arena, from byte ``start`` on."""

    handle: Any
    start: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Arena:
    """Memory and the buffers that cover it: several where one buffer may not be as large.

    ``host`` are its bytes if the host can access them.
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
        """The buffer with byte ``offset``, the offset in that buffer, and the bytes that follow
        there."""
        buffer = self.buffers[offset // self.buffers[0].nbytes]
        return buffer.handle, offset - buffer.start, buffer.start + buffer.nbytes - offset


def cut(nbytes: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of buffers of at most ``most`` bytes that cover ``nbytes``; all but the last
    have the same size."""
    if nbytes <= most:
        return [(0, nbytes)]
    size = max(most // PIECE_BYTES, 1) * PIECE_BYTES
    return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]
