"""Submits steps to the worker pool and chooses how many workers each step gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from accel.native.mapped_files import MappedFiles
from accel.native.pool import Copies, Job, WorkerPool, copies_of
from accel.packets.host_memory import AddressRange, aligned_bytes
from accel.packets.step_memory import WorkerScratch
from accel.packets.submissions import LoweredBatch, Submissions
from accel.packets.worker_tuner import WorkerChoice
from contract.ir.inputs import InputCopy
from contract.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class NativePackets:
    """The lowered packets of one shape bucket: their address in host memory and their number."""

    address: int
    count: int


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A submitted step. The workers read ``copies``, so it lives until the step has ended."""

    pool: WorkerPool
    number: int
    copies: Copies | None
    files: MappedFiles

    def ended(self) -> bool:
        """See Completion."""
        return self.pool.done(self.number)

    def collect(self) -> None:
        """See Completion: the workers have copied the outputs. Raises ModelFileError if a file
        was cut under the step, and DeviceLost if the step was abandoned."""
        self.pool.check(self.number)
        self.files.check()


@dataclass(slots=True)
class TimedWorkers:
    """Chooses the workers of each step from the times of earlier steps."""

    pool: WorkerPool
    choice: WorkerChoice
    _started: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    """Number, tokens, ops and workers of each step whose time was not noted yet."""

    def choose(self, tokens: int, ops: int) -> int:
        """The number of workers for the next step."""
        while self._started and self.pool.done(self._started[0][0]):
            number, past_tokens, past_ops, workers = self._started.popleft()
            self.choice.note(past_tokens, past_ops, workers, self.pool.seconds(number))
        return self.choice.choose(tokens, ops)

    def started(self, number: int, tokens: int, ops: int, workers: int) -> None:
        """Note that a step was submitted."""
        self._started.append((number, tokens, ops, workers))


@dataclass(frozen=True, slots=True)
class NativeSlot:
    """A slot in host memory, and the address of its inputs."""

    inputs: InputCopy
    address: int


class NativeSubmissions(Submissions[AddressRange, NativePackets, NativeSlot, NativeStep]):
    """See Submissions. The workers read a step's inputs in its slot."""

    def __init__(
        self, pool: WorkerPool, scratch: WorkerScratch, choice: WorkerChoice, files: MappedFiles
    ) -> None:
        super().__init__()
        self._files = files
        self._pool = pool
        self._scratch = scratch
        self._workers = TimedWorkers(pool, choice)
        self._job = Job()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in all slots."""
        free = [slot for slots in self._free.values() for slot in slots]
        used = [slot for _, slot in self._in_flight]
        return sum(slot.inputs.data.nbytes for slot in (*free, *used))

    def _new_slot(self, batch: LoweredBatch[AddressRange, NativePackets]) -> NativeSlot:
        data = aligned_bytes(batch.input_bytes)
        return NativeSlot(InputCopy(data), data.ctypes.data)

    def _launch(
        self,
        batch: LoweredBatch[AddressRange, NativePackets],
        slot: NativeSlot,
        outputs: Mapping[str, NDArray[np.uint8]],
    ) -> NativeStep:
        tokens = self._step.tokens
        workers = self._workers.choose(tokens, batch.packets)
        scratch, bucket = self._scratch, batch.launch
        copied = [(batch.outputs[name][1].address, to) for name, to in outputs.items()]
        copies = copies_of(copied) if copied else None
        # The pool copies the job, so that one object serves every step.
        job = self._job
        job.scratch, job.own, job.own_bytes = scratch.shared, scratch.own, scratch.own_bytes
        job.input = slot.address
        job.packets, job.count = bucket.address, bucket.count
        job.copies = 0 if copies is None else copies.ctypes.data
        job.copy_count = len(copied)
        job.workers = workers
        number = self._pool.submit(job)
        self._workers.started(number, tokens, batch.packets, workers)
        return NativeStep(self._pool, number, copies, self._files)
