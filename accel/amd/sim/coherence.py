"""Whether a launch may read what an earlier one wrote: a simulator without caches would not notice.

A launch sees the writes of one before it only if the queue waited for that one to end and then
invalidated the caches it reads through; and the host sees them only once the second-level cache was
written back. Places are 32-bit words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.amd.sim.memory_view import GpuFault

Array = NDArray[Any]


class Coherence:
    """The state of one queue. ``words`` is how many words the memory has."""

    def __init__(self, words: int) -> None:
        self._writer = np.zeros(words, np.uint32)
        self._launch = 0
        self._ended = 0
        self._visible = 0
        self._written_back = 0

    def launched(self) -> None:
        """A launch begins; the accesses that follow are its."""
        self._launch += 1

    def waited(self) -> None:
        """All launches have ended."""
        self._ended = self._launch

    def invalidated(self) -> None:
        """Caches were emptied: what had ended is visible."""
        self._visible = self._ended

    def wrote_back(self) -> None:
        """Everything that had ended is in memory."""
        self._written_back = self._ended

    def check_signal(self) -> None:
        """Raises GpuFault if the host would be told of results that are not in memory."""
        if self._written_back < self._launch:
            raise GpuFault("RELEASE_MEM signals before the second-level cache was written back")

    def read(self, words: Array) -> None:
        """See ``execute.Watcher``."""
        writers = self._writer.take(words)
        stale = (writers > self._visible) & (writers != self._launch)
        if stale.any():
            writer = int(writers[stale].flat[0])
            lacks = "ACQUIRE_MEM" if writer <= self._ended else "CS_PARTIAL_FLUSH"
            raise GpuFault(
                f"launch {self._launch} reads what launch {writer} wrote, without {lacks} between"
            )

    def wrote(self, words: Array) -> None:
        """See ``execute.Watcher``."""
        self._writer[words] = self._launch
