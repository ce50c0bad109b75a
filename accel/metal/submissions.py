"""Steps under way on one queue: what keeps the inputs and outputs of each its own.

Every step under way has a recording of its own, with a place for its inputs. Outputs lie in one
place: those that are wanted are copied from it behind the step, in the order of the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.metal.launcher import Recording
from accel.metal.memory import Allocation, Kind, Memory
from accel.metal.queue import Encode, Submission
from accel.packets.step_memory import StepAddresses
from contract.ir.inputs import InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import check_bucket

COPIED = 4
"""Bytes a copy has a multiple of."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MetalBatch:
    """A form's launches. ``barriers`` is how often launches wait for those before, ``record`` makes
    one more recording, ``free`` are those no step under way uses, ``recordings`` all there are,
    ``outputs`` where each OUTPUT buffer lies."""

    bucket: ShapeKey
    packets: int
    barriers: int
    record: Callable[[], Recording]
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]
    recordings: list[Recording] = field(default_factory=list)
    free: list[Recording] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class MetalFence:
    """Completion of one submission, whose batch lives until then."""

    batch: MetalBatch
    submission: Submission
    recording: Recording
    outputs: Mapping[str, NDArray[np.uint8]]
    _reached: Callable[[Submission], bool]
    _kept: Mapping[str, Allocation]
    _collected: bool = False

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host. Raises DeviceLost."""
        if not self._collected and self._reached(self.submission):
            for name, kept in self._kept.items():
                data = self.outputs[name]
                data[:] = kept.host[: data.nbytes]
            self._collected = True
        return self._collected

    @property
    def kept(self) -> list[Allocation]:
        """Memory its outputs were copied to."""
        return list(self._kept.values())


class Submissions:
    """All that was submitted and may still run."""

    def __init__(self, memory: Memory, places: StepAddresses) -> None:
        self._memory = memory
        self._queue = memory.queue
        self._places = places
        self._running: deque[MetalFence] = deque()
        self._kept: dict[int, list[Allocation]] = {}

    def submit(
        self,
        batch: MetalBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None = None,
    ) -> MetalFence:
        """See ``contract.tier.Tier.submit``."""
        step = step_of(inputs)
        check_bucket(batch.bucket, step)
        self._retire()
        recording = self._recording(batch)
        recording.bind(self._places)
        recording.inputs.update(inputs, rows)
        outputs, kept = self._outputs(batch, step, requested)
        encodes = [partial(recording.execute, number=n) for n in range(len(recording.runs))]
        copies = [(batch.outputs[n][1], place, outputs[n].nbytes) for n, place in kept.items()]
        encodes[-1] = partial(self._execute_and_copy, encodes[-1], copies)
        try:
            submission = self._queue.submit(encodes)
        except BaseException:
            batch.free.append(recording)
            self._give_back(kept.values())
            raise
        fence = MetalFence(batch, submission, recording, outputs, self._queue.reached, kept)
        self._running.append(fence)
        return fence

    def close(self) -> None:
        """Forget everything, which must have ended."""
        self._running.clear()
        self._kept.clear()

    def _retire(self) -> None:
        """What steps that have ended no longer need is free again."""
        while self._running and self._running[0].done:
            ended = self._running.popleft()
            ended.batch.free.append(ended.recording)
            self._give_back(ended.kept)

    def _recording(self, batch: MetalBatch) -> Recording:
        """One of the batch that no step under way uses."""
        if not batch.free:
            made = batch.record()
            batch.recordings.append(made)
            return made
        return batch.free.pop()

    def _outputs(
        self, batch: MetalBatch, step: ShapeKey, requested: Sequence[str]
    ) -> tuple[dict[str, NDArray[np.uint8]], dict[str, Allocation]]:
        """Arrays for the rows ``step`` has of each output, and memory they are copied to."""
        outputs, kept = {}, {}
        for name in requested:
            decl, _ = batch.outputs[name]
            outputs[name] = np.empty(buffer_bytes(decl, step), np.uint8)
            if nbytes := outputs[name].nbytes:
                kept[name] = self._keeping(nbytes)
        return outputs, kept

    def _keeping(self, nbytes: int) -> Allocation:
        size = 1 << (nbytes - 1).bit_length()
        free = self._kept.setdefault(size, [])
        return free.pop() if free else self._memory.allocate("outputs of a step", size, Kind.STEPS)

    def _give_back(self, kept: Iterable[Allocation]) -> None:
        for place in kept:
            self._kept.setdefault(place.nbytes, []).append(place)

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
