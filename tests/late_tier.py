"""A legal asynchronous tier at its most awkward: nothing runs before somebody waits for it.

Whatever a caller overwrites, frees or forgets too early is then wrong for sure, where a device
would be wrong now and then."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accel.native.tier import Choices, NativeBatch, NativeBuffer, NativeTier
from contract.ir.inputs import InputCopy, InputRows, LentBlock
from contract.tier import TierInfo
from harness import tiers
from tests.steps_of_process import StepsOfProcess

Bytes = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class LateFence:
    """A submission and, once it ran, what it left."""

    batch: NativeBatch
    inputs: InputCopy
    requested: tuple[str, ...]
    done: bool = False
    outputs: dict[str, Bytes] = field(default_factory=dict)


class LateTier(NativeTier):
    """The native tier behind a queue. Memory may be read and written only while the queue is
    empty."""

    def __init__(self) -> None:
        super().__init__(choices=Choices(threads=1, cache=tiers.kernel_cache("native")))
        self._stored_steps = StepsOfProcess(Path(), self.workers)
        self.queue: deque[LateFence] = deque()
        self.longest = 0
        self._copies: defaultdict[int, list[InputCopy]] = defaultdict(list)

    @property
    def info(self) -> TierInfo:
        """As the native tier's, but for the queue."""
        return replace(super().info, asynchronous=True)

    def lend_inputs(self, nbytes: int) -> LentBlock:
        """Memory that is read when a step runs."""
        return np.empty(nbytes, np.uint8).view(LentBlock)

    def submit(  # type: ignore[override]
        self,
        batch: NativeBatch,
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> LateFence:
        """Queue the step with a snapshot of its inputs, in memory of a step that ran."""
        if isinstance(inputs, LentBlock):
            snapshot = InputCopy(inputs)
        else:
            copies = self._copies[len(inputs)]
            snapshot = copies.pop() if copies else InputCopy(np.empty_like(inputs))
            snapshot.update(inputs, rows)
        fence = LateFence(batch, snapshot, tuple(requested))
        self.queue.append(fence)
        self.longest = max(self.longest, len(self.queue))
        return fence

    def wait(self, fence: LateFence, timeout: float | None = None) -> None:  # type: ignore[override]
        """Run everything up to ``fence``."""
        while not fence.done:
            late = self.queue.popleft()
            ran = super().submit(late.batch, late.inputs.data, late.requested)
            super().wait(ran, timeout)
            if not isinstance(late.inputs.data, LentBlock):
                self._copies[late.inputs.data.nbytes].append(late.inputs)
            late.outputs.update(ran.outputs)
            late.done = True

    def read(self, buffer: NativeBuffer, offset: int, nbytes: int) -> Bytes:
        """As the native tier, between steps."""
        assert not self.queue, "memory was read under a running step"
        return super().read(buffer, offset, nbytes)

    def write(self, buffer: NativeBuffer, offset: int, data: Bytes) -> None:
        """As the native tier, between steps."""
        assert not self.queue, "memory was written under a running step"
        super().write(buffer, offset, data)
