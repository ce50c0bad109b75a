"""Stored weights on their way to the device: through page-locked memory, arranged on arrival.

A part of a tensor is copied by several threads into a page-locked slot, from there by the device
into staging memory of its own or where it stays, and arranged there, while the host fills the next
slot. A thread does so one tensor after the other, so that whoever uploads can go on reading the
file. So no more than the slots is held twice, and the link is kept busy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from accel.cuda.memory import Allocation, Memory
from accel.cuda.submissions import Mark
from accel.packets.mirrors import Bytes
from accel.packets.stacks import Stack

SLOTS = 4
SLOT_BYTES = 16 << 20
COPYING_THREADS = 16
LEAST_PIECE = 1 << 18
"""Bytes below which a copy in host memory is not worth a thread of its own."""


@dataclass(slots=True)
class _Slot:
    """``staging`` is device memory of the same size; ``sent`` is passed when both are free."""

    pinned: Bytes
    staging: Allocation
    sent: Mark | None = None


class Uploader:
    """Copies host memory to one device. What it is given is read some time before ``finish`` ends
    and must not change until then. Memory is allocated in the caller's thread only."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._slots: list[_Slot] = []
        self._next = 0
        self._jobs: list[Future[None]] = []
        self._worker: ThreadPoolExecutor | None = None
        self._copiers: ThreadPoolExecutor | None = None

    def copy(self, data: Bytes, target: Allocation) -> None:
        """``data``, uint8[rows, row_bytes], as it is. Raises OutOfMemory."""
        step = max(1, SLOT_BYTES // max(1, data.shape[1]))
        parts = [range(n, min(n + step, len(data))) for n in range(0, len(data), step)]

        def job() -> None:
            for rows in parts:
                part = data[rows.start : rows.stop]
                with self._slot(part) as slot:
                    host = slot.pinned[: part.size]
                    self._memory.transfer(target, host, True, rows.start * data.shape[1])

        self._later(job, max((len(rows) for rows in parts), default=0) * data.shape[1])

    def arrange(self, stack: Stack, launch: Callable[[int, range], None]) -> None:
        """A stack in parts: ``launch(address, groups)`` has ``groups`` arranged, whose stored rows
        lie at ``address`` on the device. Raises OutOfMemory."""
        parts = stack.parts(SLOT_BYTES)

        def job() -> None:
            for groups in parts:
                part = stack.stored(groups)
                with self._slot(part) as slot:
                    self._memory.transfer(slot.staging, slot.pinned[: part.size], True, 0)
                    launch(slot.staging.address, groups)

        self._later(job, max((stack.stored(groups).size for groups in parts), default=0))

    def finish(self) -> None:
        """Return when everything was enqueued. Raises what went wrong meanwhile."""
        while self._jobs:
            self._jobs.pop(0).result()

    def close(self) -> None:
        """As ``finish``, and give the slots back. Safe to call twice."""
        self.finish()
        if self._slots:
            self._memory.synchronize()
        self.forget()

    def forget(self) -> None:
        """Give up what was not enqueued yet: the device is lost."""
        for pool in (self._worker, self._copiers):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        self._worker = self._copiers = None
        self._jobs.clear()
        for slot in self._slots:
            self._memory.free(slot.staging)
        self._slots.clear()

    def _later(self, job: Callable[[], None], slot_bytes: int) -> None:
        if not slot_bytes:
            return
        if not self._slots or self._slots[0].pinned.size < slot_bytes:
            self.close()
            self._slots = [self._new_slot(max(SLOT_BYTES, slot_bytes)) for _ in range(SLOTS)]
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "upload")
            self._copiers = ThreadPoolExecutor(COPYING_THREADS, "copy")
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()
        self._jobs.append(self._worker.submit(job))

    def _new_slot(self, nbytes: int) -> _Slot:
        staging = self._memory.allocate("staging of weights", nbytes, zeroed=False)
        return _Slot(self._memory.pinned.take(nbytes), staging)

    @contextmanager
    def _slot(self, part: Bytes) -> Iterator[_Slot]:
        """A slot that holds ``part``, used again once what is enqueued inside has ended."""
        self._next = (self._next + 1) % len(self._slots)
        slot = self._slots[self._next]
        if slot.sent is not None:
            slot.sent.wait()
        self._fill(slot.pinned[: part.size].reshape(part.shape), part)
        yield slot
        slot.sent = Mark(self._memory.context, self._memory.stream)

    def _fill(self, target: Bytes, part: Bytes) -> None:
        """Copy with several threads: one alone is slower than the link."""
        pieces = min(COPYING_THREADS, os.cpu_count() or 1, max(1, part.size // LEAST_PIECE))
        if pieces == 1 or self._copiers is None:
            np.copyto(target, part)
            return
        if len(part) < pieces:
            target, part = target.reshape(-1), np.ascontiguousarray(part).reshape(-1)
        bounds = np.linspace(0, len(part), pieces + 1).astype(int)
        ranges = [slice(a, b) for a, b in pairwise(bounds)]
        list(self._copiers.map(lambda r: np.copyto(target[r], part[r]), ranges))
