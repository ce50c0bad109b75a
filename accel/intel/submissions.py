"""Steps in flight on one queue: each has a recording with memory for its inputs.

All steps write outputs to the same memory; requested ones are copied from there by the last command
list of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from accel.intel.launcher import ENDED, Recording
from accel.intel.memory import Allocation, Memory
from accel.packets.arenas import ArenaKind
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import (
    CopiedStep,
    LoweredBatch,
    OutputCopies,
    RecordedSubmissions,
    Recordings,
)

IntelRecordings = Recordings[Recording]


@dataclass(frozen=True, slots=True)
class IntelStep(CopiedStep[Allocation]):
    """A submitted step."""

    recording: Recording


class IntelSubmissions(RecordedSubmissions[Allocation, Recording, IntelStep]):
    """See RecordedSubmissions."""

    def __init__(self, memory: Memory, addresses: StepAddresses) -> None:
        super().__init__()
        self._memory = memory
        self._addresses = addresses
        self._copies = OutputCopies(
            lambda nbytes: memory.allocate(
                "outputs of a step", nbytes, ArenaKind.HOST, zeroed=False
            )
        )

    def close(self) -> None:
        super().close()
        self._copies.clear()

    def _launch(
        self,
        batch: LoweredBatch[Allocation, IntelRecordings],
        slot: Recording,
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> IntelStep:
        # What the host wrote into mapped memory counts only if nothing was running.
        if not self._in_flight:
            for source, target in self._memory.mirrored(to_device=True):
                self._memory.copy(source, 0, target, 0, target.nbytes)
        slot.bind(self._addresses)
        copies = self._copies.take(outputs)
        copied = [(batch.outputs[n][1], target, outputs[n].nbytes) for n, target in copies.items()]
        mirrored = self._memory.mirrored(to_device=False)
        copied += [(source, target, source.nbytes) for source, target in mirrored]
        try:
            slot.execute([(source.address, target.address, n) for source, target, n in copied])
        except BaseException:
            self._copies.give_back(copies.values())
            raise
        reached = partial(slot.events.reached, ENDED)
        return IntelStep(reached, outputs, copies, self._copies, slot)
