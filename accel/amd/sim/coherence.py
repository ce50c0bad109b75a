"""Checks that a launch may read what an earlier one wrote, which a simulator without caches would
not notice.

A launch sees the writes of an earlier one only if the queue waited for that one and then
invalidated the caches it reads through; the host sees them only once the second-level cache was
written back. Memory is tracked in 32-bit words."""

import numpy as np

from accel.amd.sim.memory_view import GpuFault
from contract.arrays import Array


class Coherence:
    """The state of one queue; the memory has ``words`` words."""

    def __init__(self, words: int) -> None:
        self._writer = np.zeros(words, np.uint32)
        self._launch = 0
        self._ended = 0
        self._visible = 0
        self._written_back = 0

    def launched(self) -> None:
        """A launch begins; the accesses that follow are its own."""
        self._launch += 1

    def waited(self) -> None:
        """All launches have ended."""
        self._ended = self._launch

    def invalidated(self) -> None:
        """Caches were invalidated: the writes of all ended launches are visible."""
        self._visible = self._ended

    def wrote_back(self) -> None:
        """The writes of all ended launches are in memory."""
        self._written_back = self._ended

    def check_signal(self) -> None:
        """Raises GpuFault if the host is signalled before the results are in memory."""
        if self._written_back < self._launch:
            raise GpuFault("RELEASE_MEM signals before the second-level cache was written back")

    def read(self, words: Array) -> None:
        writers = self._writer.take(words)
        stale = (writers > self._visible) & (writers != self._launch)
        if stale.any():
            writer = int(writers[stale].flat[0])
            lacks = "ACQUIRE_MEM" if writer <= self._ended else "CS_PARTIAL_FLUSH"
            raise GpuFault(
                f"launch {self._launch} reads what launch {writer} wrote, without {lacks} between"
            )

    def wrote(self, words: Array) -> None:
        self._writer[words] = self._launch
