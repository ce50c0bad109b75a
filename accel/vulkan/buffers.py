"""Consecutive buffers that cover one allocation of device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PIECE_BYTES = 64 << 10
"""Alignment of buffers that share memory, the largest that drivers need."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A VkBuffer over ``nbytes`` bytes of its memory, from byte ``start`` on."""

    handle: Any
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory and the buffers that cover it: several where one buffer may not be as large."""

    buffers: tuple[Buffer, ...]
    memory: Any

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
