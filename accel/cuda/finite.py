"""The device checks weights for infinite numbers and NaN while they are uploaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.cuda.launcher import Arguments, LaunchShape, start_kernel
from accel.cuda.memory import Allocation, Memory
from accel.cuda.program import Modules, tuned_source
from contract.tier import FiniteWords

THREADS = 256
MAX_GROUPS = 512
WORD_BYTES = 4


@dataclass(slots=True)
class FiniteCheck:
    """Looks for numbers that are not finite on one device, and remembers whether there were any."""

    memory: Memory
    modules: Modules
    _found: Allocation | None = None
    _function: Any = None

    def build(self) -> None:
        """Build the kernel."""
        if self._function is None:
            source = tuned_source("find_broken.cu", {})
            self._function = self.modules.function(source, "find_broken")

    def prepare(self) -> None:
        """Build the kernel and allocate its result; afterwards any thread may call ``look``."""
        self.build()
        if self._found is None:
            self._found = self.memory.allocate("check of weights", WORD_BYTES)

    def look(self, address: int, nbytes: int, words: FiniteWords) -> None:
        """Enqueue a check of ``nbytes`` bytes of stored blocks at ``address``. ``words`` says which
        one or two words of a block are looked at."""
        assert self._found is not None
        blocks = nbytes // words.block_bytes
        offsets = words.offsets[0], words.offsets[-1]
        numbers = blocks, words.block_bytes, *offsets, words.word_bytes, words.exponent
        addresses = map(np.uint64, (address, self._found.address))
        arguments = Arguments(*addresses, *map(np.uint32, numbers))
        groups = max(1, min(-(-blocks // THREADS), MAX_GROUPS))
        shape = LaunchShape(self._function, (groups, 1, 1), THREADS)
        start_kernel(self.memory.context, self.memory.stream, shape, arguments)

    def passed(self) -> bool:
        """Whether everything checked is finite. Waits for the device."""
        if self._found is None:
            return True
        found = self.memory.read(self._found, 0, WORD_BYTES)
        self.memory.free(self._found)
        self._found = None
        return not found.any()
