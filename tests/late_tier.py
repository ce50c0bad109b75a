"""A legal asynchronous tier at its most awkward: nothing runs before somebody waits for it.

Whatever a caller overwrites, frees or forgets too early is then wrong for sure, where a device
would be wrong now and then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from contract.ir.inputs import InputCopy, InputRows
from contract.tier import TierInfo
from reference.cpu.tier import CpuBatch, CpuBuffer, CpuTier

Bytes = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class LateFence:
    """A submission and, once it ran, what it left."""

    batch: CpuBatch
    inputs: InputCopy
    requested: tuple[str, ...]
    done: bool = False
    outputs: dict[str, Bytes] = field(default_factory=dict)


class LateTier(CpuTier):
    """The CPU tier behind a queue. Memory may be read and written only while the queue is empty."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.queue: deque[LateFence] = deque()
        self.longest = 0
        self._free: defaultdict[int, list[InputCopy]] = defaultdict(list)

    @property
    def info(self) -> TierInfo:
        """As the CPU tier's, but for the queue."""
        return replace(super().info, asynchronous=True)

    def submit(  # type: ignore[override]
        self,
        batch: CpuBatch,
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> LateFence:
        """Queue the step with a snapshot of its inputs, in memory of a step that ran."""
        free = self._free[len(inputs)]
        snapshot = free.pop() if free else InputCopy(np.empty_like(inputs))
        snapshot.update(inputs, rows)
        fence = LateFence(batch, snapshot, tuple(requested))
        self.queue.append(fence)
        self.longest = max(self.longest, len(self.queue))
        return fence

    def wait(self, fence: LateFence, timeout: float | None = None) -> None:  # type: ignore[override]
        """Run everything up to ``fence``."""
        while not fence.done:
            late = self.queue.popleft()
            outputs: Mapping[str, Bytes] = (
                super().submit(late.batch, late.inputs.data, late.requested).outputs
            )
            self._free[late.inputs.data.nbytes].append(late.inputs)
            late.outputs.update(outputs)
            late.done = True

    def read(self, buffer: CpuBuffer, offset: int, nbytes: int) -> Bytes:
        """As the CPU tier, between steps."""
        assert not self.queue, "memory was read under a running step"
        return super().read(buffer, offset, nbytes)

    def write(self, buffer: CpuBuffer, offset: int, data: Bytes) -> None:
        """As the CPU tier, between steps."""
        assert not self.queue, "memory was written under a running step"
        super().write(buffer, offset, data)
