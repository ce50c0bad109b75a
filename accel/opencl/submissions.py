"""Steps under way on one device: what keeps the inputs and outputs of each its own.

The queue runs steps in order. Where the device reads host memory a step reads its snapshot itself;
else the snapshot is copied, in the order of the queue, to the one place all steps read their inputs
from, so that no step meets those of another. An output that is wanted is copied out in the order of
the queue, too, before the next step overwrites it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.opencl.launcher import LaunchContext, Recording
from accel.opencl.memory import Allocation, BankedMemory, aligned_bytes
from accel.packets.in_flight import InFlight, Pace
from accel.packets.staging_buffers import Bytes
from contract.ir.inputs import InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.tier import check_bucket

COPYING_ITEMS = 16
"""Work-items that copy an output: few, for a processor runs each on a core."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class OpenClBatch:
    """A form's packets in device memory and how to enqueue them.

    ``barriers`` is how often the workers meet in one step, ``input_bytes`` the size of a step's
    inputs, ``outputs`` where each OUTPUT buffer lies.
    """

    bucket: ShapeKey
    packets: int
    barriers: int
    recording: Recording
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True, eq=False)
class OpenClFence:
    """Completion of one submission, whose batch lives until then."""

    batch: OpenClBatch
    event: Any
    complete: int
    submitted: float
    outputs: Mapping[str, NDArray[np.uint8]]

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host."""
        return bool(self.event.command_execution_status <= self.complete)

    @property
    def pace(self) -> Pace:
        """That of its batch."""
        return self.batch.pace


class Submissions:
    """All that was submitted and may still run. ``place`` is where a device with memory of its own
    reads the inputs."""

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch
        self._complete = launch.cl.COMPLETE
        self._in_flight: InFlight[OpenClFence] = InFlight(aligned_bytes)
        self._copy = launch.cl.Kernel(launch.program, "copy_output") if self._shared else None
        self.place: Allocation | None = None

    @property
    def nbytes(self) -> int:
        """Host memory of all snapshots."""
        return self._in_flight.nbytes

    def submit(
        self,
        batch: OpenClBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None = None,
    ) -> OpenClFence:
        """See ``contract.tier.Tier.submit``."""
        step = step_of(inputs)
        check_bucket(batch.bucket, step)
        self._in_flight.retire()
        memory = self._launch.memory
        # What the host wrote into mapped memory counts only if nothing was running.
        sent = [] if self._in_flight else memory.to_device()
        snapshot = self._in_flight.snapshot(inputs, batch.input_bytes, rows)
        done = [batch.recording.enqueue(self._provided(snapshot.data, sent), step.tokens)]
        outputs = {name: self._kept(batch.outputs[name], step, done) for name in requested}
        done += memory.to_host()
        self._launch.queue.flush()
        fence = OpenClFence(batch, done[-1], self._complete, time.monotonic(), outputs)
        # Events wait for what they stand for if they are given up.
        self._in_flight.add(fence, snapshot, sent + done)
        return fence

    def close(self) -> None:
        """Forget everything, which must have ended."""
        self._in_flight.close()

    @property
    def _shared(self) -> bool:
        return self._launch.memory.shared

    def _provided(self, snapshot: Bytes, sent: list[Any]) -> int:
        """The address from which the step now to be enqueued reads its inputs."""
        memory = self._launch.memory
        if not isinstance(memory, BankedMemory):
            return int(snapshot.ctypes.data)
        assert self.place is not None
        sent.append(memory.transfer(self.place, snapshot, to_device=True))
        return self.place.address

    def _kept(
        self, output: tuple[BufferDecl, Allocation], step: ShapeKey, done: list[Any]
    ) -> NDArray[np.uint8]:
        """The rows ``step`` has of an output, filled once all before it in the queue has ended."""
        decl, allocation = output
        data = np.empty(buffer_bytes(decl, step), np.uint8)
        memory = self._launch.memory
        if not data.nbytes:
            return data
        if isinstance(memory, BankedMemory):
            done.append(memory.transfer(allocation, data, to_device=False))
            return data
        assert self._copy is not None
        addresses = np.uint64(allocation.address), np.uint64(data.ctypes.data)
        self._copy.set_args(*addresses, np.uint64(data.nbytes // 4))
        launch = self._launch
        size = (COPYING_ITEMS,)
        done.append(launch.cl.enqueue_nd_range_kernel(launch.queue, self._copy, size, None))
        return data
