"""The word in device memory that makes kernels waiting for each other's data end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from accel.cuda.driver import CudaError
from accel.cuda.memory import Allocation, Memory
from accel.packets.staging_buffers import Bytes

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class StopWord:
    """``word`` in device memory is 0 until ``set`` copies ``one`` there, on a stream that waits for
    no kernel."""

    memory: Memory
    word: Allocation
    one: Bytes
    stream: Any

    @property
    def address(self) -> int:
        """The address that kernels read."""
        return self.word.address

    def set(self) -> None:
        """Make waiting kernels end, whatever they have computed. Does not wait for them."""
        with suppress(CudaError):
            address, here = self.word.address, self.one.ctypes.data
            self.memory.context.call("cuMemcpyHtoDAsync", address, here, WORD_BYTES, self.stream)


def make_stop_word(memory: Memory, stream: Any) -> StopWord:
    """A word of 0. Raises OutOfMemory."""
    one = memory.pinned.zeroed(WORD_BYTES)
    one[0] = 1
    return StopWord(memory, memory.allocate("stop word", WORD_BYTES), one, stream)
