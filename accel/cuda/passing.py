"""Memory by which launches of a step pass data to later launches of the same step."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel.cuda.memory import Allocation, Memory


@dataclass(slots=True)
class PassingMemory:
    """One block of memory for all buckets of a device, whose steps run one after the other.

    It is never freed before ``memory``, since launches are recorded with its address.
    """

    memory: Memory
    _made: list[Allocation] = field(default_factory=list)

    def address(self, nbytes: int) -> int:
        """The address of ``nbytes`` bytes, 0 for none. Raises OutOfMemory."""
        if not nbytes:
            return 0
        if not self._made or self._made[-1].nbytes < nbytes:
            self._made.append(self.memory.allocate("what launches pass on", nbytes))
        return self._made[-1].address
