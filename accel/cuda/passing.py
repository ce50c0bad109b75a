"""Memory in which launches of a step leave what later launches of the same step read."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel.cuda.memory import Allocation, Memory


@dataclass(slots=True)
class PassingMemory:
    """One for all forms of a device, whose steps run one after the other. It lives as long as
    ``memory``: launches are recorded with its address."""

    memory: Memory
    _made: list[Allocation] = field(default_factory=list)

    def address(self, nbytes: int) -> int:
        """Where so many bytes are, 0 for none. Raises OutOfMemory."""
        if not nbytes:
            return 0
        if not self._made or self._made[-1].nbytes < nbytes:
            self._made.append(self.memory.allocate("what launches pass on", nbytes))
        return self._made[-1].address
