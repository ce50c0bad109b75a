"""Steps in flight on one queue: each has a recording with memory for its inputs.

All steps write outputs to the same memory; requested ones are copied from there after the step, in
the order of the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.metal.launcher import Recording
from accel.metal.memory import Allocation, Memory
from accel.metal.queue import Encode, Queue, Submission
from accel.packets.arenas import ArenaKind
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import (
    CopiedStep,
    LoweredBatch,
    OutputCopies,
    RecordedSubmissions,
    Recordings,
)

COPIED = 4
"""The number of bytes of a copy is a multiple of this."""


MetalRecordings = Recordings[Recording]


@dataclass(frozen=True, slots=True)
class MetalStep(CopiedStep[Allocation]):
    """A committed step."""

    submission: Submission


class MetalSubmissions(RecordedSubmissions[Allocation, Recording, MetalStep]):
    """See RecordedSubmissions."""

    def __init__(self, memory: Memory, addresses: StepAddresses) -> None:
        super().__init__()
        self._queue: Queue = memory.queue
        self._addresses = addresses
        self._copies = OutputCopies(
            lambda nbytes: memory.allocate("outputs of a step", nbytes, ArenaKind.STEPS)
        )

    def close(self) -> None:
        super().close()
        self._copies.clear()

    def _launch(
        self,
        batch: LoweredBatch[Allocation, MetalRecordings],
        slot: Recording,
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> MetalStep:
        slot.bind(self._addresses)
        copies = self._copies.take(outputs)
        encodes = [partial(slot.execute, number=n) for n in range(len(slot.runs))]
        sources = [(batch.outputs[n][1], to, outputs[n].nbytes) for n, to in copies.items()]
        encodes[-1] = partial(self._execute_and_copy, encodes[-1], sources)
        try:
            submission = self._queue.submit(encodes)
        except BaseException:
            self._copies.give_back(copies.values())
            raise
        reached = partial(self._queue.reached, submission)
        return MetalStep(reached, outputs, copies, self._copies, submission)

    def _execute_and_copy(
        self, execute: Encode, copies: Sequence[tuple[Allocation, Allocation, int]], buffer: Any
    ) -> None:
        execute(buffer)
        if not copies:
            return
        selector = "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"
        with self._queue.encoding(buffer, "blitCommandEncoder") as encoder:
            for source, target, nbytes in copies:
                self._queue.objc.send(
                    encoder,
                    selector,
                    *(source.arena.handle, source.offset),
                    *(target.arena.handle, target.offset),
                    -(-nbytes // COPIED) * COPIED,
                )
