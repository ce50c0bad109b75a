"""Steps in flight on one queue: every one has a recording of its own, with memory for its inputs.

Outputs lie where all steps leave them: those that are wanted are copied from there behind the step,
in the order of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.metal.launcher import Recording
from accel.metal.memory import Allocation, Kind, Memory
from accel.metal.queue import Encode, Queue, Submission
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import CopiedStep, FormBatch, OutputCopies, Submissions

COPIED = 4
"""Bytes a copy has a multiple of."""


@dataclass(frozen=True, slots=True)
class MetalForm:
    """What submits a form. ``record`` makes one more recording; ``recordings`` are all there are,
    ``free`` those that no step in flight uses."""

    record: Callable[[], Recording]
    recordings: list[Recording] = field(default_factory=list)
    free: list[Recording] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MetalStep(CopiedStep[Allocation]):
    """A step as it was committed."""

    submission: Submission


class MetalSubmissions(Submissions[Allocation, MetalForm, Recording, MetalStep]):
    """See Submissions."""

    def __init__(self, memory: Memory, places: StepAddresses) -> None:
        super().__init__()
        self._queue: Queue = memory.queue
        self._places = places
        self._copies = OutputCopies(
            lambda nbytes: memory.allocate("outputs of a step", nbytes, Kind.STEPS)
        )

    def close(self) -> None:
        """See Submissions."""
        super().close()
        self._copies.clear()

    def _free_slots(self, batch: FormBatch[Allocation, MetalForm]) -> list[Recording]:
        return batch.launch.free

    def _new_slot(self, batch: FormBatch[Allocation, MetalForm]) -> Recording:
        made = batch.launch.record()
        batch.launch.recordings.append(made)
        return made

    def _launch(
        self,
        batch: FormBatch[Allocation, MetalForm],
        slot: Recording,
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> MetalStep:
        slot.bind(self._places)
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
                    *(source.arena.buffer, source.offset),
                    *(target.arena.buffer, target.offset),
                    -(-nbytes // COPIED) * COPIED,
                )
