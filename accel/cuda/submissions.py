"""Steps under way on one device: what keeps the inputs and outputs of each its own.

The stream runs steps in order. The snapshot of a step's inputs lies in page-locked memory and is
copied, in the order of the stream, to the one place all steps read their inputs from. An output
that is wanted is copied to page-locked memory of its own before the next step overwrites it. The
host waits for nothing in between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.driver import NOT_READY, Context, CudaError, Handle
from accel.cuda.launcher import Recording
from accel.cuda.memory import Allocation, Memory
from accel.packets.under_way import Pace, UnderWay
from contract.errors import DeviceLost
from contract.ir.inputs import InputCopy, InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import check_form


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CudaBatch:
    """A form's launches. ``packets`` is the number of launches of a step, ``input_bytes`` the size
    of its inputs, ``outputs`` where each OUTPUT buffer lies."""

    form: ShapeKey
    packets: int
    recording: Recording
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]
    pace: Pace = field(default_factory=Pace)


class Mark:
    """A place in a stream."""

    def __init__(self, context: Context, stream: Any) -> None:
        self._context = context
        flags = context.binding.CUevent_flags
        disabled = flags.CU_EVENT_DISABLE_TIMING
        event = context.call("cuEventCreate", disabled)
        self._event = Handle(context, event, "cuEventDestroy")
        context.call("cuEventRecord", event, stream)
        self._passed = False

    def move(self, stream: Any) -> None:
        """To the end of a stream, from a place that is passed."""
        self._passed = False
        self._context.call("cuEventRecord", self._event.value, stream)

    @property
    def passed(self) -> bool:
        """Whether all before it has ended. Raises CudaError when that failed."""
        if not self._passed:
            try:
                self._context.call("cuEventQuery", self._event.value)
            except CudaError as error:
                if error.name != NOT_READY:
                    raise
                return False
            self._passed = True
        return True

    def wait(self) -> None:
        """Return when it is passed."""
        self._context.call("cuEventSynchronize", self._event.value)


@dataclass(frozen=True, slots=True, eq=False)
class CudaFence:
    """Completion of one submission, whose batch lives until then."""

    batch: CudaBatch
    mark: Mark
    submitted: float
    outputs: Mapping[str, NDArray[np.uint8]]

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host. Raises DeviceLost."""
        try:
            return self.mark.passed
        except CudaError as error:
            raise DeviceLost(str(error)) from None

    @property
    def pace(self) -> Pace:
        """That of its batch."""
        return self.batch.pace


class Submissions:
    """All that was submitted and may still run. ``place`` is where kernels read the inputs."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._under_way: UnderWay[CudaFence] = UnderWay(memory.pinned.take)
        self.place: Allocation | None = None

    def submit(
        self,
        batch: CudaBatch,
        inputs: NDArray[np.uint8],
        wanted: Sequence[str],
        rows: InputRows | None = None,
    ) -> CudaFence:
        """See ``contract.tier.Tier.submit``. Raises CudaError."""
        return self.finish(batch, self.start(batch, inputs, rows), wanted)

    def start(
        self, batch: CudaBatch, inputs: NDArray[np.uint8], rows: InputRows | None = None
    ) -> InputCopy:
        """Enqueue the inputs and the launches of a step; ``finish`` has to follow. Nothing here
        waits for the device. Raises CudaError."""
        step = step_of(inputs)
        check_form(batch.form, step)
        memory = self._memory
        self._under_way.retire()
        # What the host wrote into mapped memory counts only if nothing was running.
        if not self._under_way:
            memory.mirrors.to_device()
        snapshot = self._under_way.snapshot(inputs, batch.input_bytes, rows)
        assert self.place is not None
        memory.transfer(self.place, snapshot.data, True, 0)
        batch.recording.enqueue(memory.stream)
        return snapshot

    def finish(self, batch: CudaBatch, snapshot: InputCopy, wanted: Sequence[str]) -> CudaFence:
        """Enqueue the copies of what is wanted of the step that ``start`` gave ``snapshot`` for.
        Raises CudaError."""
        memory, step = self._memory, step_of(snapshot.data)
        outputs = {name: self._kept(batch.outputs[name], step) for name in wanted}
        memory.mirrors.to_host()
        fence = CudaFence(batch, Mark(memory.context, memory.stream), time.monotonic(), outputs)
        self._under_way.add(fence, snapshot, kept=outputs)
        return fence

    def close(self) -> None:
        """Forget everything, which must have ended or be lost."""
        self._under_way.close()

    def _kept(self, output: tuple[BufferDecl, Allocation], step: ShapeKey) -> NDArray[np.uint8]:
        """The rows ``step`` has of an output, filled once all before it in the stream has ended."""
        decl, allocation = output
        data = self._memory.pinned.take(buffer_bytes(decl, step))
        if data.nbytes:
            self._memory.transfer(allocation, data, False, 0)
        return data
