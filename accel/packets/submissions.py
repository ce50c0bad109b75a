"""Steps in flight on one device, and the memory that keeps their inputs and outputs apart.

A device executes steps in order of submission. Every step in flight has a slot, memory for its
inputs, which is reused after the step has ended. The fence of a step gets its outputs before a
later step overwrites them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from accel.packets.in_flight import Pace
from contract.arrays import Bytes
from contract.ir.inputs import InputCopy, InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.tier import check_bucket


class Completion(Protocol):
    """The completion of one submitted step."""

    def ended(self) -> bool:
        """Whether all writes of the step are done. Raises DeviceLost."""

    def collect(self) -> None:
        """Copy the outputs if the host has to; called once, after the end."""


class Slot(Protocol):
    """Memory for the inputs of one step in flight."""

    @property
    def inputs(self) -> InputCopy:
        """The copy of the step's inputs."""


A = TypeVar("A")
L = TypeVar("L")
S = TypeVar("S", bound=Slot)
C = TypeVar("C", bound=Completion)


@dataclass(frozen=True, eq=False)
class LoweredBatch(Generic[A, L]):
    """A graph lowered for one shape bucket, ready to be submitted.

    ``packets`` is the number of ops of a step, ``launch`` the tier's recording of them,
    ``input_bytes`` the size of a step's inputs, ``outputs`` the memory of each OUTPUT buffer."""

    bucket: ShapeKey
    packets: int
    launch: L
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, A]]
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True, eq=False)
class StepFence(Generic[A, L, C]):
    """See ``contract.tier.Fence``. ``submitted`` is the time of submission by
    ``time.monotonic``."""

    batch: LoweredBatch[A, L]
    outputs: Mapping[str, Bytes]
    completion: C
    submitted: float
    _collected: bool = False

    @property
    def done(self) -> bool:
        """True once every write of the submission is visible to the host. Raises DeviceLost."""
        if not self._collected and self.completion.ended():
            self.completion.collect()
            self._collected = True
        return self._collected

    @property
    def pace(self) -> Pace:
        """The recent duration of steps of this batch."""
        return self.batch.pace


class Submissions(ABC, Generic[A, L, S, C]):
    """The steps in flight on one device. A tier implements ``_new_slot`` and ``_launch``."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[StepFence[A, L, C], S]] = deque()
        self._free: dict[int, list[S]] = {}
        self._step = ShapeKey(0, 0)
        """Tokens and rows of the step that is being submitted."""

    def submit(
        self,
        batch: LoweredBatch[A, L],
        inputs: Bytes,
        requested: Sequence[str],
        rows: InputRows | None = None,
    ) -> StepFence[A, L, C]:
        """Submit a step at once: ``start``, then ``finish``."""
        return self.finish(batch, self.start(batch, inputs, rows), requested)

    def start(self, batch: LoweredBatch[A, L], inputs: Bytes, rows: InputRows | None = None) -> S:
        """Copy a step's inputs to a slot; the caller then calls ``finish``."""
        self._step = step_of(inputs)
        check_bucket(batch.bucket, self._step)
        self.retire()
        free = self._free_slots(batch)
        slot = free.pop() if free else self._new_slot(batch)
        self._fill(slot, inputs, rows)
        return slot

    def finish(
        self, batch: LoweredBatch[A, L], slot: S, requested: Sequence[str]
    ) -> StepFence[A, L, C]:
        """Submit the step whose inputs are in ``slot``."""
        step = self._step
        outputs = {
            name: self._array(buffer_bytes(batch.outputs[name][0], step)) for name in requested
        }
        try:
            completion = self._launch(batch, slot, outputs)
        except BaseException:
            self._free_slots(batch).append(slot)
            raise
        fence = StepFence(batch, outputs, completion, time.monotonic())
        self._in_flight.append((fence, slot))
        return fence

    def is_last(self, fence: StepFence[A, L, C]) -> bool:
        """Whether the step of ``fence`` was submitted last."""
        return bool(self._in_flight) and self._in_flight[-1][0] is fence

    def retire(self) -> None:
        """Reuse the slots of ended steps. Raises DeviceLost."""
        while self._in_flight and self._in_flight[0][0].done:
            fence, slot = self._in_flight.popleft()
            self._free_slots(fence.batch).append(slot)

    def close(self) -> None:
        """Forget all steps; each has ended, or the device is lost."""
        self._in_flight.clear()
        self._free.clear()

    def _fill(self, slot: S, inputs: Bytes, rows: InputRows | None) -> None:
        """Copy a step's inputs to a slot."""
        slot.inputs.update(inputs, rows)

    @abstractmethod
    def _new_slot(self, batch: LoweredBatch[A, L]) -> S:
        """Allocate memory for the inputs of one more step."""

    @abstractmethod
    def _launch(self, batch: LoweredBatch[A, L], slot: S, outputs: Mapping[str, Bytes]) -> C:
        """Start a step after all earlier ones; its results are copied to ``outputs``."""

    def _free_slots(self, batch: LoweredBatch[A, L]) -> list[S]:
        """The slots that no step in flight uses; batches with equal input sizes share them."""
        return self._free.setdefault(batch.input_bytes, [])

    def _array(self, nbytes: int) -> Bytes:
        """Host memory for the bytes of an output."""
        return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, slots=True)
class Recordings(Generic[S]):
    """The recordings of one batch. Each step in flight uses one, which holds the step's inputs.

    ``record`` makes another; ``made`` are all of them, ``free`` those that no step in flight
    uses."""

    record: Callable[[], S]
    made: list[S] = field(default_factory=list)
    free: list[S] = field(default_factory=list)


class RecordedSubmissions(Submissions[A, Recordings[S], S, C]):
    """Submissions whose slots are recordings. A tier implements ``_launch``."""

    def _free_slots(self, batch: LoweredBatch[A, Recordings[S]]) -> list[S]:
        return batch.launch.free

    def _new_slot(self, batch: LoweredBatch[A, Recordings[S]]) -> S:
        made = batch.launch.record()
        batch.launch.made.append(made)
        return made


@dataclass(frozen=True, slots=True)
class HostSlot:
    """A slot in host memory."""

    inputs: InputCopy


class HostSeen(Protocol):
    """Device memory that the host can read."""

    nbytes: int

    @property
    def host(self) -> Bytes | None:
        """The bytes of the memory."""


H = TypeVar("H", bound=HostSeen)


class OutputCopies(Generic[H]):
    """Memory visible to the host to which a device copies outputs after a step.
    ``allocate(nbytes)`` makes more. Sizes are powers of two, and memory is reused once the host has
    read it."""

    def __init__(self, allocate: Callable[[int], H]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[H]] = {}

    def take(self, outputs: Mapping[str, Bytes]) -> dict[str, H]:
        """Memory for each output that is not empty."""
        return {name: self._take(data.nbytes) for name, data in outputs.items() if data.nbytes}

    def give_back(self, copies: Iterable[H]) -> None:
        """Reuse ``copies``, which nothing writes any more."""
        for copy in copies:
            self._free.setdefault(copy.nbytes, []).append(copy)

    def clear(self) -> None:
        """Forget all copies."""
        self._free.clear()

    def _take(self, nbytes: int) -> H:
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else self._allocate(size)


@dataclass(frozen=True, slots=True)
class CopiedStep(Generic[H]):
    """A step whose outputs the device copies to ``copies``; ``reached()`` is True once it has
    ended, and ``free`` takes the copies back. ``handle`` is what a tier waits for."""

    handle: Any
    reached: Callable[[], bool]
    outputs: Mapping[str, Bytes]
    copies: Mapping[str, H]
    free: OutputCopies[H]

    def ended(self) -> bool:
        return self.reached()

    def collect(self) -> None:
        for name, copy in self.copies.items():
            assert copy.host is not None
            data = self.outputs[name]
            data[:] = copy.host[: data.nbytes]
        self.free.give_back(self.copies.values())


class CopyingSubmissions(RecordedSubmissions[H, S, CopiedStep[H]]):
    """Recorded steps whose outputs the device copies to memory from ``allocate(nbytes)``. A tier
    implements ``_execute``."""

    def __init__(self, allocate: Callable[[int], H]) -> None:
        super().__init__()
        self._copies = OutputCopies(allocate)

    def close(self) -> None:
        super().close()
        self._copies.clear()

    def _launch(
        self, batch: LoweredBatch[H, Recordings[S]], slot: S, outputs: Mapping[str, Bytes]
    ) -> CopiedStep[H]:
        copies = self._copies.take(outputs)
        copied = [(batch.outputs[n][1], to, outputs[n].nbytes) for n, to in copies.items()]
        try:
            handle, reached = self._execute(slot, copied)
        except BaseException:
            self._copies.give_back(copies.values())
            raise
        return CopiedStep(handle, reached, outputs, copies, self._copies)

    @abstractmethod
    def _execute(self, slot: S, copies: list[tuple[H, H, int]]) -> tuple[Any, Callable[[], bool]]:
        """Start a step after all earlier ones, and then ``copies``: source, target and bytes of
        each. Returns ``handle`` and ``reached`` of the step."""
