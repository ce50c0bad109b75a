"""Steps in flight on the worker pool, and how many workers each of them gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from accel.native.pool import Copies, Job, WorkerPool, copies_of
from accel.packets.host_memory import AddressRange, aligned_bytes
from accel.packets.submissions import FormBatch, HostSlot, Submissions
from accel.packets.worker_tuner import Choice
from contract.ir.inputs import InputCopy, step_of
from contract.lazy_dataclass import dataclass


@dataclass(slots=True)
class Scratch:
    """Addresses of the scratch memory all workers share and of the first worker's own, of which
    each has ``own_bytes``."""

    shared: int = 0
    own: int = 0
    own_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NativeForm:
    """What submits a form: its packets in memory."""

    address: int
    count: int


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step that was submitted. ``copies`` is read until it has ended."""

    pool: WorkerPool
    number: int
    copies: Copies | None

    def ended(self) -> bool:
        """See Completion."""
        return self.pool.done(self.number)

    def collect(self) -> None:
        """See Completion: the workers have copied the outputs."""


@dataclass(slots=True)
class TimedWorkers:
    """Chooses the workers of each step by how long steps took."""

    pool: WorkerPool
    choice: Choice
    _started: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Number, tokens and workers of steps whose time was not noted yet."""

    def choose(self, tokens: int) -> int:
        """Workers of the next step."""
        while self._started and self.pool.done(self._started[0][0]):
            number, ended_tokens, workers = self._started.popleft()
            self.choice.note(ended_tokens, workers, self.pool.seconds(number))
        return self.choice.choose(tokens)

    def started(self, number: int, tokens: int, workers: int) -> None:
        """A step was submitted."""
        self._started.append((number, tokens, workers))


class NativeSubmissions(Submissions[AddressRange, NativeForm, HostSlot, NativeStep]):
    """See Submissions. The workers read a step's inputs where its slot has them."""

    def __init__(self, pool: WorkerPool, scratch: Scratch, choice: Choice) -> None:
        super().__init__()
        self._pool = pool
        self._scratch = scratch
        self._workers = TimedWorkers(pool, choice)

    @property
    def nbytes(self) -> int:
        """Host memory of all slots."""
        free = [slot for slots in self._free.values() for slot in slots]
        used = [slot for _, slot in self._in_flight]
        return sum(slot.inputs.data.nbytes for slot in (*free, *used))

    def _new_slot(self, batch: FormBatch[AddressRange, NativeForm]) -> HostSlot:
        return HostSlot(InputCopy(aligned_bytes(batch.input_bytes)))

    def _launch(
        self,
        batch: FormBatch[AddressRange, NativeForm],
        slot: HostSlot,
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> NativeStep:
        data = slot.inputs.data
        tokens = step_of(data).tokens
        workers = self._workers.choose(tokens)
        scratch, bucket = self._scratch, batch.launch
        copied = [(batch.outputs[name][1].address, to) for name, to in outputs.items()]
        copies = copies_of(copied) if copied else None
        job = Job(
            scratch=scratch.shared,
            own=scratch.own,
            own_bytes=scratch.own_bytes,
            input=data.ctypes.data,
            packets=bucket.address,
            copies=0 if copies is None else copies.ctypes.data,
            count=bucket.count,
            copy_count=len(copied),
            workers=workers,
        )
        number = self._pool.submit(job)
        self._workers.started(number, tokens, workers)
        return NativeStep(self._pool, number, copies)
