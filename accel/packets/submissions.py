"""Steps in flight on one device: what keeps the inputs and outputs of each apart from the others'.

A device runs steps in the order they are submitted. Every step in flight has memory of its own for
its inputs, its slot, which another step takes once it has ended. Outputs are handed to the step's
fence before a later step overwrites them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from accel.packets.in_flight import Pace
from contract.ir.inputs import InputCopy, InputRows, step_of
from contract.ir.nodes import BufferDecl
from contract.ir.scratch import buffer_bytes
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey
from contract.tier import check_bucket

Bytes = NDArray[np.uint8]


class Completion(Protocol):
    """One step that was submitted to a device."""

    def ended(self) -> bool:
        """Whether all its writes have been made. Raises DeviceLost."""

    def collect(self) -> None:
        """Fill the arrays of its outputs where that is the host's work; called once, at its end."""


class Slot(Protocol):
    """Memory for the inputs of one step in flight."""

    @property
    def inputs(self) -> InputCopy:
        """The copy of the step's inputs."""


A = TypeVar("A")
L = TypeVar("L")
S = TypeVar("S", bound=Slot)
C = TypeVar("C", bound=Completion)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class FormBatch(Generic[A, L]):
    """A form of a graph, ready to be submitted.

    ``packets`` is the number of operations of a step, ``barriers`` how many of them wait for those
    before, ``launch`` what the tier recorded to start them, ``input_bytes`` the size of a step's
    inputs, ``outputs`` where each OUTPUT buffer lies.
    """

    bucket: ShapeKey
    packets: int
    barriers: int
    launch: L
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, A]]
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True, eq=False)
class StepFence(Generic[A, L, C]):
    """See ``contract.tier.Fence``. ``submitted`` is when, by ``time.monotonic``."""

    batch: FormBatch[A, L]
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
        """That of its batch."""
        return self.batch.pace


class Submissions(ABC, Generic[A, L, S, C]):
    """The steps in flight on one device. A tier gives ``_new_slot`` and ``_launch``."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[StepFence[A, L, C], S]] = deque()
        self._free: dict[int, list[S]] = {}

    def submit(
        self,
        batch: FormBatch[A, L],
        inputs: Bytes,
        requested: Sequence[str],
        rows: InputRows | None = None,
    ) -> StepFence[A, L, C]:
        """See ``contract.tier.Tier.submit``."""
        return self.finish(batch, self.start(batch, inputs, rows), requested)

    def start(self, batch: FormBatch[A, L], inputs: Bytes, rows: InputRows | None = None) -> S:
        """Copy a step's inputs to a slot; ``finish`` has to follow."""
        check_bucket(batch.bucket, step_of(inputs))
        self.retire()
        free = self._free_slots(batch)
        slot = free.pop() if free else self._new_slot(batch)
        slot.inputs.update(inputs, rows)
        return slot

    def finish(
        self, batch: FormBatch[A, L], slot: S, requested: Sequence[str]
    ) -> StepFence[A, L, C]:
        """Submit the step whose inputs are in ``slot``."""
        step = step_of(slot.inputs.data)
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

    def retire(self) -> None:
        """Take back the slots of steps that have ended. Raises DeviceLost."""
        while self._in_flight and self._in_flight[0][0].done:
            fence, slot = self._in_flight.popleft()
            self._free_slots(fence.batch).append(slot)

    def close(self) -> None:
        """Forget everything, which must have ended or be lost."""
        self._in_flight.clear()
        self._free.clear()

    @abstractmethod
    def _new_slot(self, batch: FormBatch[A, L]) -> S:
        """Memory for the inputs of one more step."""

    @abstractmethod
    def _launch(self, batch: FormBatch[A, L], slot: S, outputs: Mapping[str, Bytes]) -> C:
        """Start a step after all before it, and have ``outputs`` filled with what it leaves."""

    def _free_slots(self, batch: FormBatch[A, L]) -> list[S]:
        """Slots no step in flight uses: by default batches whose inputs have one size share."""
        return self._free.setdefault(batch.input_bytes, [])

    def _array(self, nbytes: int) -> Bytes:
        """Host memory for the bytes of an output."""
        return np.empty(nbytes, np.uint8)


@dataclass(frozen=True, slots=True)
class HostSlot:
    """A slot in host memory."""

    inputs: InputCopy


class HostSeen(Protocol):
    """Device memory the host sees."""

    nbytes: int

    @property
    def host(self) -> Bytes | None:
        """Its bytes."""


H = TypeVar("H", bound=HostSeen)


class OutputCopies(Generic[H]):
    """Memory the host sees that devices copy outputs to behind a step; ``allocate(nbytes)`` makes
    more. Each has a power of two bytes and is used again once the host has taken its contents."""

    def __init__(self, allocate: Callable[[int], H]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[H]] = {}

    def take(self, outputs: Mapping[str, Bytes]) -> dict[str, H]:
        """Memory for each output that has any bytes."""
        return {name: self._take(data.nbytes) for name, data in outputs.items() if data.nbytes}

    def give_back(self, copies: Iterable[H]) -> None:
        """Nothing writes to ``copies`` any more."""
        for copy in copies:
            self._free.setdefault(copy.nbytes, []).append(copy)

    def clear(self) -> None:
        """Forget all of it."""
        self._free.clear()

    def _take(self, nbytes: int) -> H:
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else self._allocate(size)


@dataclass(frozen=True, slots=True)
class CopiedStep(Generic[H]):
    """A step whose outputs the device copies to ``copies``; ``reached`` says whether it ended."""

    reached: Callable[[], bool]
    outputs: Mapping[str, Bytes]
    copies: Mapping[str, H]
    free: OutputCopies[H]

    def ended(self) -> bool:
        """See Completion."""
        return self.reached()

    def collect(self) -> None:
        """See Completion."""
        for name, copy in self.copies.items():
            assert copy.host is not None
            data = self.outputs[name]
            data[:] = copy.host[: data.nbytes]
        self.free.give_back(self.copies.values())
