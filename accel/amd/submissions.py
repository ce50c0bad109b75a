"""Steps under way on one queue: what keeps the inputs and outputs of each its own.

Every step under way has a recording of its own, with a place for its inputs. Outputs lie in one
place: the next step goes into the queue once those that are wanted were copied from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.amd.device import Allocation
from accel.amd.launcher import Recording
from accel.amd.queue import Queue
from accel.packets.in_flight import CompletionWaiter, Pace
from accel.packets.step_memory import StepAddresses
from contract.ir.inputs import InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import check_bucket


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AmdBatch:
    """A form's launches. ``barriers`` is how often launches wait for those before, ``record`` makes
    one more recording, ``recordings`` are those there are, ``outputs`` where each OUTPUT buffer
    lies."""

    bucket: ShapeKey
    packets: int
    barriers: int
    record: Callable[[], Recording]
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]
    recordings: list[Recording] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True, eq=False)
class AmdFence:
    """Completion of one submission, whose batch lives until then."""

    batch: AmdBatch
    number: int
    outputs: Mapping[str, NDArray[np.uint8]]
    submitted: float
    _queue: Queue
    _collected: bool = False

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host. Raises DeviceLost."""
        if not self._collected and self._queue.reached(self.number):
            for name, data in self.outputs.items():
                data[:] = self.batch.outputs[name][1].host[: data.nbytes]
            self._collected = True
        return self._collected

    @property
    def pace(self) -> Pace:
        """That of its batch."""
        return self.batch.pace


@dataclass(slots=True)
class Submissions:
    """All that was submitted and may still run."""

    queue: Queue
    places: StepAddresses
    waiting: CompletionWaiter = field(default_factory=CompletionWaiter)
    _last: AmdFence | None = None

    def submit(
        self,
        batch: AmdBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None,
        seconds: float,
    ) -> AmdFence:
        """See ``contract.tier.Tier.submit``. Raises DeviceLost."""
        step = step_of(inputs)
        check_bucket(batch.bucket, step)
        if self._last is not None and self._last.outputs:
            self.queue.wait(self._last.number, seconds)
            assert self._last.done
        recording = self._free(batch)
        recording.bind(self.places)
        recording.inputs.update(inputs, rows)
        outputs = {
            name: np.empty(buffer_bytes(batch.outputs[name][0], step), np.uint8)
            for name in requested
        }
        now = time.monotonic()
        buffer = self.queue.indirect_buffer(recording.buffer, recording.length)
        recording.number = self.queue.submit(buffer)
        self._last = AmdFence(batch, recording.number, outputs, now, self.queue)
        return self._last

    def _free(self, batch: AmdBatch) -> Recording:
        """A recording of the batch that does not run."""
        ended = self.queue.fence
        for recording in batch.recordings:
            if recording.number <= ended:
                return recording
        batch.recordings.append(batch.record())
        return batch.recordings[-1]

    def finish(self, seconds: float) -> None:
        """Wait for everything. Raises DeviceLost."""
        self.queue.wait(self.queue.number, seconds)
