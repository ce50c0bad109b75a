"""Steps in flight on one device, and the memory that separates their inputs and outputs.

The stream runs steps in order. The snapshot of a step's inputs lies in page-locked memory and is
copied to one of two input buffers, from which kernels read: for a step of few launches this
overlaps with the previous step, which reads the other buffer. A requested output is copied to
page-locked memory before the next step overwrites it; copies of mapped outputs overlap with that
step. The host never waits in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.cuda.driver import NOT_READY, Context, CudaError, Handle
from accel.cuda.launcher import Recording
from accel.cuda.memory import Allocation, Memory
from accel.cuda.row_end import is_drawn, is_plain
from accel.packets.submissions import HostSlot, LoweredBatch, StepFence, Submissions
from contract.arrays import Bytes
from contract.errors import DeviceLost
from contract.ir.inputs import InputCopy, InputRows, LentBlock
from contract.records import SAMPLING

INPUT_BUFFERS = 2
"""Input buffers: one is filled while a step reads the other."""


@dataclass(frozen=True, slots=True)
class ShortRecordings:
    """Recordings that suffice for a step with a single row whose logits nothing changes:
    ``largest`` takes the largest logit, ``drawn`` samples a token.

    ``sampling`` is the offset of the row's sampling record in the inputs. A step that samples
    ``position`` or a later one uses ``long``, if there is one."""

    largest: Recording
    drawn: Recording
    sampling: int
    long: Recording | None = None
    position: int = 0

    @property
    def recordings(self) -> list[Recording]:
        """All recordings."""
        return [self.largest, self.drawn, *(() if self.long is None else (self.long,))]

    def enough_for(self, inputs: Bytes) -> Recording | None:
        """The recording that suffices for a step with these inputs, None if there is none."""
        stop = self.sampling + SAMPLING.itemsize
        record = inputs[self.sampling : stop].view(SAMPLING)[0]
        if self.long is not None and record["position"] >= self.position:
            return self.long
        if not is_plain(record):
            return None
        return self.drawn if is_drawn(record) else self.largest


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """All launches of a bucket, and the shorter recordings for rows whose logits nothing
    changes."""

    whole: Recording
    short: ShortRecordings | None = None

    def recorded_for(self, inputs: Bytes) -> Recording:
        """The launches of a step with these inputs."""
        found = None if self.short is None else self.short.enough_for(inputs)
        return self.whole if found is None else found

    @property
    def recordings(self) -> list[Recording]:
        """All recordings."""
        return [self.whole, *(() if self.short is None else self.short.recordings)]


CudaBatch = LoweredBatch[Allocation, RecordedBucket]


class Mark:
    """A CUDA event, recorded in a stream after everything enqueued so far."""

    def __init__(self, context: Context, stream: Any) -> None:
        self._context = context
        flags = context.binding.CUevent_flags
        disabled = flags.CU_EVENT_DISABLE_TIMING
        event = context.call("cuEventCreate", disabled)
        self._event = Handle(context, event, "cuEventDestroy")
        context.call("cuEventRecord", event, stream)
        self._passed = False

    def move(self, stream: Any) -> None:
        """Move a passed mark to the end of a stream."""
        self._passed = False
        self._context.quick("cuEventRecord", self._event.value, stream)

    def hold(self, stream: Any) -> None:
        """Make what follows in another stream wait for this mark."""
        self._context.quick("cuStreamWaitEvent", stream, self._event.value, 0)

    @property
    def passed(self) -> bool:
        """Whether everything before the mark has ended. Raises CudaError when that failed."""
        if not self._passed:
            try:
                self._context.quick("cuEventQuery", self._event.value)
            except CudaError as error:
                if error.name != NOT_READY:
                    raise
                return False
            self._passed = True
        return True

    def wait(self) -> None:
        """Return when it is passed."""
        self._context.call("cuEventSynchronize", self._event.value)


@dataclass(slots=True)
class LaterMark:
    """A mark in the stream of steps that is made when it is first asked for."""

    memory: Memory
    made: Mark | None = None

    def __call__(self) -> Mark:
        if self.made is None:
            self.made = Mark(self.memory.context, self.memory.stream)
        return self.made


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step as it was enqueued. ``marked`` gives a mark after the copies of its outputs."""

    marked: Callable[[], Mark]

    def ended(self) -> bool:
        try:
            return self.marked().passed
        except CudaError as error:
            raise DeviceLost(str(error)) from None

    def collect(self) -> None:
        """See Completion: the device has already copied the outputs."""


@dataclass(frozen=True, slots=True)
class CudaSlot(HostSlot):
    """A slot in page-locked memory at ``address``, and the event after all copies of its step.
    ``unread`` are the slots of earlier steps whose outputs nobody waits for."""

    ended: Mark
    address: int
    unread: list[tuple[CudaBatch, CudaSlot]] = field(default_factory=list)


CudaFence = StepFence[Allocation, RecordedBucket, CudaStep]


@dataclass(slots=True)
class InputSlots:
    """Input buffers of a step: ``INPUT_BUFFERS`` of them in one allocation, used in turn.

    Nothing is copied to one before the last step that read it has ended."""

    memory: Memory
    allocation: Allocation
    turn: int = 0
    _readers: list[Mark] = field(init=False)
    _copied: Mark = field(init=False)
    _read_since: bool = False
    addresses: list[int] = field(init=False)
    """The address of each input buffer."""

    def __post_init__(self) -> None:
        context, streams = self.memory.context, self.memory.streams
        apart = self.allocation.nbytes // INPUT_BUFFERS
        self.addresses = [self.allocation.address + n * apart for n in range(INPUT_BUFFERS)]
        # Allocating enqueues zeroing in the stream of steps.
        self._readers = [Mark(context, streams.steps) for _ in range(INPUT_BUFFERS)]
        self._copied = Mark(context, streams.inputs)

    def fill(self, data: int, nbytes: int, overlaps: bool) -> int:
        """Enqueue the copy of ``nbytes`` bytes at address ``data``, overlapping with steps if
        ``overlaps``, and return the address of the copy."""
        self.turn = (self.turn + 1) % INPUT_BUFFERS if overlaps else 0
        memory, streams = self.memory, self.memory.streams
        address = self.addresses[self.turn]
        stream = streams.inputs if overlaps else streams.steps
        if overlaps:
            if self.turn == 0 and self._read_since:
                self.read()
            self._readers[self.turn].hold(stream)
        memory.context.quick("cuMemcpyHtoDAsync", address, data, nbytes, stream)
        if overlaps:
            self._copied.move(stream)
            self._copied.hold(streams.steps)
        return address

    def read(self) -> Mark:
        """A mark after the step that was enqueued last, which reads the buffer filled last."""
        reader = self._readers[self.turn]
        reader.move(self.memory.stream)
        self._read_since &= self.turn != 0
        return reader

    def read_later(self) -> None:
        """As ``read``, for a step that read the first buffer: the mark is made when it is asked
        for."""
        self._read_since = True


class CudaSubmissions(Submissions[Allocation, RecordedBucket, CudaSlot, CudaStep]):
    """See Submissions. ``start`` enqueues the launches of a step, ``finish`` the copies of its
    outputs."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self.before_step: Callable[[], None] = lambda: None
        """Enqueues what comes between steps."""
        self._input_slots: InputSlots | None = None
        self._unread: list[tuple[CudaBatch, CudaSlot]] = []
        self._computed: Mark

    @property
    def input_memory(self) -> Allocation | None:
        """The memory of all input buffers."""
        return None if self._input_slots is None else self._input_slots.allocation

    @input_memory.setter
    def input_memory(self, memory: Allocation) -> None:
        if memory is not self.input_memory:
            self._input_slots = InputSlots(self._memory, memory)

    def prepare(self, batch: CudaBatch) -> None:
        """Make the graphs that steps of a batch need. Raises CudaError."""
        assert self._input_slots is not None
        for recording in batch.launch.recordings:
            for address in self._input_slots.addresses[
                : INPUT_BUFFERS if recording.is_brief else 1
            ]:
                recording.prepare(self._memory.stream, address)

    def submit(
        self,
        batch: CudaBatch,
        inputs: Bytes,
        requested: Sequence[str],
        rows: InputRows | None = None,
    ) -> CudaFence:
        """See Submissions. Raises CudaError."""
        with self._memory.context.many_calls():
            return super().submit(batch, inputs, requested, rows)

    def start(self, batch: CudaBatch, inputs: Bytes, rows: InputRows | None = None) -> CudaSlot:
        """Enqueue the inputs and the launches of a step; the caller must call ``finish`` next.
        Nothing here waits for the device. Raises CudaError."""
        slot = self._enqueued(batch, inputs, rows)
        slot.unread.extend(self._unread)
        self._unread.clear()
        assert self._input_slots is not None
        self._computed = self._input_slots.read()
        return slot

    def submit_unread(
        self,
        batch: CudaBatch,
        inputs: Bytes,
        rows: InputRows | None,
        change: Callable[[int], None] | None = None,
    ) -> CudaFence:
        """Enqueue a step whose outputs stay on the device. Few calls of the driver: its inputs are
        copied in the stream of steps, and a mark is made only if somebody asks. ``change`` enqueues
        what changes the inputs at an address before the step reads them. Raises CudaError."""
        with self._memory.context.many_calls():
            slot = self._enqueued(batch, inputs, rows, True, change)
        self._unread.append((batch, slot))
        assert self._input_slots is not None
        self._input_slots.read_later()
        marked = LaterMark(self._memory)
        return StepFence(batch, {}, CudaStep(marked), time.monotonic())

    def retire(self) -> None:
        """See Submissions: with the slots of the unread steps in front of ended ones."""
        while self._in_flight and self._in_flight[0][0].done:
            fence, slot = self._in_flight.popleft()
            for batch, ended in (*slot.unread, (fence.batch, slot)):
                self._free_slots(batch).append(ended)
            slot.unread.clear()

    def close(self) -> None:
        super().close()
        self._unread.clear()

    def _enqueued(
        self,
        batch: CudaBatch,
        inputs: Bytes,
        rows: InputRows | None,
        unread: bool = False,
        change: Callable[[int], None] | None = None,
    ) -> CudaSlot:
        """The slot of a step whose inputs and launches were enqueued."""
        slot = super().start(batch, inputs, rows)
        memory = self._memory
        lent = isinstance(inputs, LentBlock)
        snapshot = inputs if lent else slot.inputs.data
        # What the host wrote into mapped memory counts only if nothing was running.
        if not self._in_flight and not self._unread:
            memory.to_device()
        assert self._input_slots is not None
        self.before_step()
        recording = batch.launch.recorded_for(snapshot)
        source = inputs.ctypes.data if lent else slot.address
        # Behind unread steps the host is what is late: a copy in order takes it fewer calls.
        overlaps = recording.is_brief and not unread and not self._unread
        address = self._input_slots.fill(source, snapshot.nbytes, overlaps)
        if change is not None:
            change(address)
        recording.enqueue(memory.stream, address)
        return slot

    def _fill(self, slot: CudaSlot, inputs: Bytes, rows: InputRows | None) -> None:
        if not isinstance(inputs, LentBlock):
            super()._fill(slot, inputs, rows)

    def _new_slot(self, batch: CudaBatch) -> CudaSlot:
        memory = self._memory
        inputs = InputCopy(memory.pinned.take(batch.input_bytes))
        ended = Mark(memory.context, memory.streams.outputs)
        return CudaSlot(inputs, ended, inputs.data.ctypes.data)

    def _array(self, nbytes: int) -> Bytes:
        return self._memory.pinned.take(nbytes)

    def _launch(self, batch: CudaBatch, slot: CudaSlot, outputs: Mapping[str, Bytes]) -> CudaStep:
        """Enqueue the copies of the outputs of the step that ``start`` enqueued."""
        memory = self._memory
        copies = [
            memory.transfer(batch.outputs[name][1], data, False, 0)
            for name, data in outputs.items()
            if data.nbytes
        ]
        copies += memory.states_to_host()
        if copies:
            self._computed.move(memory.stream)
        self._computed.hold(memory.streams.outputs)
        written = [allocation for _, allocation in batch.outputs.values()]
        memory.outputs_to_host(written)
        slot.ended.move(memory.streams.outputs)
        return CudaStep(lambda: slot.ended)
