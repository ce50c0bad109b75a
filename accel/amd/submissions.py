"""Steps in flight on one queue: each has a recording with memory for its inputs.

All steps write outputs to the same memory; the next step is submitted after requested outputs were
copied from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.amd.device import Allocation
from accel.amd.launcher import Recording
from accel.amd.queue import Queue
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import LoweredBatch, RecordedSubmissions, Recordings

AmdRecordings = Recordings[Recording]


@dataclass(frozen=True, slots=True)
class AmdStep:
    """A submitted step; ``sources`` is where it writes ``outputs``."""

    queue: Queue
    number: int
    outputs: Mapping[str, NDArray[np.uint8]]
    sources: Mapping[str, Allocation]

    def ended(self) -> bool:
        return self.queue.reached(self.number)

    def collect(self) -> None:
        for name, data in self.outputs.items():
            data[:] = self.sources[name].host[: data.nbytes]


class AmdSubmissions(RecordedSubmissions[Allocation, Recording, AmdStep]):
    """See RecordedSubmissions."""

    def __init__(self, queue: Queue, addresses: StepAddresses) -> None:
        super().__init__()
        self._queue = queue
        self._addresses = addresses

    def finish_all(self) -> None:
        """Wait for everything. Raises DeviceLost."""
        self._queue.wait(self._queue.number, DEFAULT_TIMEOUT_SECONDS)

    def _launch(
        self,
        batch: LoweredBatch[Allocation, AmdRecordings],
        slot: Recording,
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> AmdStep:
        if self._in_flight and self._in_flight[-1][0].outputs:
            self.finish_all()
            self.retire()
        slot.bind(self._addresses)
        slot.number = self._queue.submit(self._queue.indirect_buffer(slot.buffer, slot.length))
        sources = {name: batch.outputs[name][1] for name in outputs}
        return AmdStep(self._queue, slot.number, outputs, sources)
