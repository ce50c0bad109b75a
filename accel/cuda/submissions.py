"""Steps under way on one device: what keeps the inputs and outputs of each its own.

The stream runs steps in order. The snapshot of a step's inputs lies in page-locked memory and is
copied to one of two places, from which kernels read it: of a step of few launches beside the step
in front of it, which reads the other. An output that is wanted is copied to page-locked memory of
its own before the next step overwrites it, what the host has mapped of others beside that one. The
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
from accel.cuda.row_end import is_drawn, is_plain
from accel.packets.in_flight import InFlight, Pace
from contract.errors import DeviceLost
from contract.ir.inputs import InputCopy, InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.records import SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import check_bucket

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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CudaBatch:
    """A form's launches. ``packets`` is the number of launches of a step, ``input_bytes`` the size
    of its inputs, ``outputs`` where each OUTPUT buffer lies."""

    bucket: ShapeKey
    packets: int
    recording: Recording
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]
    short: ShortRecordings | None = None
    pace: Pace = field(default_factory=Pace)

    def recorded_for(self, inputs: NDArray[np.uint8]) -> Recording:
        """The launches of a step with these inputs."""
        found = None if self.short is None else self.short.enough_for(inputs)
        return self.recording if found is None else found

    @property
    def recordings(self) -> list[Recording]:
        """All there are of it."""
        return [self.recording, *(() if self.short is None else self.short.recordings)]


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


class Submissions:
    """All that was submitted and may still run."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._in_flight: InFlight[CudaFence] = InFlight(memory.pinned.take)
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
        for recording in batch.recordings:
            for address in self._places.addresses[: PLACES if recording.is_brief else 1]:
                recording.prepare(self._memory.stream, address)

    def submit(
        self,
        batch: CudaBatch,
        inputs: NDArray[np.uint8],
        requested: Sequence[str],
        rows: InputRows | None = None,
    ) -> CudaFence:
        """See ``contract.tier.Tier.submit``. Raises CudaError."""
        return self.finish(batch, self.start(batch, inputs, rows), requested)

    def start(
        self, batch: CudaBatch, inputs: NDArray[np.uint8], rows: InputRows | None = None
    ) -> InputCopy:
        """Enqueue the inputs and the launches of a step; ``finish`` has to follow. Nothing here
        waits for the device. Raises CudaError."""
        step = step_of(inputs)
        check_bucket(batch.bucket, step)
        memory = self._memory
        self._in_flight.retire()
        # What the host wrote into mapped memory counts only if nothing was running.
        if not self._in_flight:
            memory.staging.to_device()
        snapshot = self._in_flight.snapshot(inputs, batch.input_bytes, rows)
        assert self._places is not None
        recording = batch.recorded_for(snapshot.data)
        place = self._places.fill(snapshot.data, recording.is_brief)
        recording.enqueue(memory.stream, place)
        self._places.read(Mark(memory.context, memory.stream))
        return snapshot

    def finish(self, batch: CudaBatch, snapshot: InputCopy, requested: Sequence[str]) -> CudaFence:
        """Enqueue the copies of what is wanted of the step that ``start`` gave ``snapshot`` for.
        Raises CudaError."""
        memory, step = self._memory, step_of(snapshot.data)
        outputs = {name: self._kept(batch.outputs[name], step) for name in requested}
        memory.staging.states_to_host()
        Mark(memory.context, memory.stream).hold(memory.streams.outputs)
        memory.staging.outputs_to_host(memory.leave)
        fence = CudaFence(
            batch, Mark(memory.context, memory.streams.outputs), time.monotonic(), outputs
        )
        self._in_flight.add(fence, snapshot, kept=outputs)
        return fence

    def close(self) -> None:
        """Forget everything, which must have ended or be lost."""
        self._in_flight.close()

    def _kept(self, output: tuple[BufferDecl, Allocation], step: ShapeKey) -> NDArray[np.uint8]:
        """The rows ``step`` has of an output, filled once all before it in the stream has ended."""
        decl, allocation = output
        data = self._memory.pinned.take(buffer_bytes(decl, step))
        if data.nbytes:
            self._memory.transfer(allocation, data, False, 0)
        return data
