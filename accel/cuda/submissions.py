"""Steps in flight on one device: what keeps the inputs and outputs of each its own.

The stream runs steps in order. The snapshot of a step's inputs lies in page-locked memory and is
copied to one of two places, from which kernels read it: of a step of few launches beside the step
in front of it, which reads the other. An output that is wanted is copied to page-locked memory of
its own before the next step overwrites it, what the host has mapped of others beside that one. The
host waits for nothing in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.driver import NOT_READY, Context, CudaError, Handle
from accel.cuda.launcher import Recording
from accel.cuda.memory import Allocation, Memory
from accel.cuda.row_end import is_drawn, is_plain
from accel.packets.submissions import FormBatch, HostSlot, StepFence, Submissions
from contract.errors import DeviceLost
from contract.ir.inputs import InputCopy, InputRows
from contract.records import SAMPLING

PLACES = 2
"""For inputs: one is filled while a step reads the other."""


@dataclass(frozen=True, slots=True)
class ShortRecordings:
    """What is enough for a step whose only row takes its ``largest`` logit, or is ``drawn`` from
    logits that nothing changes; ``sampling`` is where among the inputs that is said. One that
    samples ``position`` or a later one takes ``long``, if there is one."""

    largest: Recording
    drawn: Recording
    sampling: int
    long: Recording | None = None
    position: int = 0

    @property
    def recordings(self) -> list[Recording]:
        """All of them."""
        return [self.largest, self.drawn, *(() if self.long is None else (self.long,))]

    def enough_for(self, inputs: NDArray[np.uint8]) -> Recording | None:
        """The one for a step with these inputs, if there is one."""
        stop = self.sampling + SAMPLING.itemsize
        record = inputs[self.sampling : stop].view(SAMPLING)[0]
        if self.long is not None and record["position"] >= self.position:
            return self.long
        if not is_plain(record):
            return None
        return self.drawn if is_drawn(record) else self.largest


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """All launches of a form, and the shorter recordings of rows that nothing changes."""

    whole: Recording
    short: ShortRecordings | None = None

    def recorded_for(self, inputs: NDArray[np.uint8]) -> Recording:
        """The launches of a step with these inputs."""
        found = None if self.short is None else self.short.enough_for(inputs)
        return self.whole if found is None else found

    @property
    def recordings(self) -> list[Recording]:
        """All there are of it."""
        return [self.whole, *(() if self.short is None else self.short.recordings)]


CudaBatch = FormBatch[Allocation, RecordedBucket]


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

    def hold(self, stream: Any) -> None:
        """Have what follows in another stream wait until it is passed."""
        self._context.call("cuStreamWaitEvent", stream, self._event.value, 0)

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


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step as it was enqueued. ``mark`` is behind the copies of its outputs."""

    mark: Mark

    def ended(self) -> bool:
        """See Completion."""
        try:
            return self.mark.passed
        except CudaError as error:
            raise DeviceLost(str(error)) from None

    def collect(self) -> None:
        """See Completion: the device has copied them."""


CudaFence = StepFence[Allocation, RecordedBucket, CudaStep]


@dataclass(slots=True)
class InputSlots:
    """Where kernels read a step's inputs: ``PLACES`` of ``nbytes`` in one allocation, used in turn.
    Nothing is copied to one before the step that read it last has ended."""

    memory: Memory
    allocation: Allocation
    readers: list[Mark] = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        # Whoever allocates zeroes, in the stream of steps.
        zeroed = Mark(self.memory.context, self.memory.stream)
        self.readers = [zeroed] * PLACES

    @property
    def addresses(self) -> list[int]:
        """Of all places."""
        apart = self.allocation.nbytes // PLACES
        return [self.allocation.address + number * apart for number in range(PLACES)]

    def fill(self, data: NDArray[np.uint8], beside: bool) -> int:
        """Enqueue the copy of ``data``, ``beside`` the steps or behind them: its address."""
        self.turn = (self.turn + 1) % PLACES if beside else 0
        memory, streams = self.memory, self.memory.streams
        address = self.addresses[self.turn]
        stream = streams.inputs if beside else streams.steps
        if beside:
            self.readers[self.turn].hold(stream)
        memory.context.call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, stream)
        if beside:
            Mark(memory.context, stream).hold(streams.steps)
        return address

    def read(self, step: Mark) -> None:
        """Whoever reads the place filled last has ended at ``step``."""
        self.readers[self.turn] = step


class CudaSubmissions(Submissions[Allocation, RecordedBucket, HostSlot, CudaStep]):
    """See Submissions. ``start`` enqueues the launches of a step, ``finish`` what follows them."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._places: InputSlots | None = None

    @property
    def place(self) -> Allocation | None:
        """Where kernels read inputs."""
        return None if self._places is None else self._places.allocation

    @place.setter
    def place(self, place: Allocation) -> None:
        if place is not self.place:
            self._places = InputSlots(self._memory, place)

    def prepare(self, batch: CudaBatch) -> None:
        """Make what steps of a batch are going to need. Raises CudaError."""
        assert self._places is not None
        for recording in batch.launch.recordings:
            for address in self._places.addresses[: PLACES if recording.is_brief else 1]:
                recording.prepare(self._memory.stream, address)

    def start(
        self, batch: CudaBatch, inputs: NDArray[np.uint8], rows: InputRows | None = None
    ) -> HostSlot:
        """Enqueue the inputs and the launches of a step; ``finish`` has to follow. Nothing here
        waits for the device. Raises CudaError."""
        slot = super().start(batch, inputs, rows)
        memory, snapshot = self._memory, slot.inputs.data
        # What the host wrote into mapped memory counts only if nothing was running.
        if not self._in_flight:
            memory.staging.to_device()
        assert self._places is not None
        recording = batch.launch.recorded_for(snapshot)
        place = self._places.fill(snapshot, recording.is_brief)
        recording.enqueue(memory.stream, place)
        self._places.read(Mark(memory.context, memory.stream))
        return slot

    def _new_slot(self, batch: CudaBatch) -> HostSlot:
        return HostSlot(InputCopy(self._memory.pinned.take(batch.input_bytes)))

    def _array(self, nbytes: int) -> NDArray[np.uint8]:
        return self._memory.pinned.take(nbytes)

    def _launch(
        self, batch: CudaBatch, slot: HostSlot, outputs: Mapping[str, NDArray[np.uint8]]
    ) -> CudaStep:
        """Enqueue the copies of the outputs of the step that ``start`` enqueued."""
        memory = self._memory
        for name, data in outputs.items():
            if data.nbytes:
                memory.transfer(batch.outputs[name][1], data, False, 0)
        memory.staging.states_to_host()
        Mark(memory.context, memory.stream).hold(memory.streams.outputs)
        memory.staging.outputs_to_host(memory.leave)
        return CudaStep(Mark(memory.context, memory.streams.outputs))
