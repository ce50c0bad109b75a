"""Stored weights on their way to the device: through page-locked memory, arranged on arrival.

A part of a tensor is copied by several threads into a page-locked slot, from there by the device
into its own staging memory or where it stays, and arranged there, while the host fills the next
slot. So no more than the slots is held twice, and the link is kept busy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from accel.cuda.memory import Allocation, Memory
from accel.cuda.submissions import Mark
from accel.packets.mirrors import Bytes
from accel.packets.stacks import Stack

SLOTS = 4
SLOT_BYTES = 32 << 20
COPYING_THREADS = 8
LEAST_PIECE = 1 << 20
"""Bytes below which a copy in host memory is not worth a thread of its own."""


@dataclass(slots=True)
class _Slot:
    """``staging`` is device memory of the same size, made when it is first wanted."""

    pinned: Bytes
    staging: Allocation | None = None
    sent: Mark | None = None


class Uploader:
    """Copies host memory to one device. Its slots exist between ``open`` and ``close``."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._slots: list[_Slot] = []
        self._next = 0
        self._threads: ThreadPoolExecutor | None = None

    def copy(self, data: Bytes, target: Allocation) -> None:
        """``data``, uint8[rows, row_bytes], as it is. Its bytes were read when this returns."""
        step = max(1, SLOT_BYTES // max(1, data.shape[1]))
        for first in range(0, len(data), step):
            part = data[first : first + step]
            with self._slot(part) as slot:
                host = slot.pinned[: part.size]
                self._memory.transfer(target, host, True, first * data.shape[1])

    def arrange(self, stack: Stack, launch: Callable[[int, range], None]) -> None:
        """A stack in parts: ``launch(address, groups)`` has ``groups`` arranged, whose stored rows
        lie at ``address`` on the device."""
        for groups in stack.parts(SLOT_BYTES):
            part = stack.stored(groups)
            with self._slot(part) as slot:
                if slot.staging is None:
                    what = "staging of weights"
                    slot.staging = self._memory.allocate(what, slot.pinned.size, zeroed=False)
                self._memory.transfer(slot.staging, slot.pinned[: part.size], True, 0)
                launch(slot.staging.address, groups)

    def close(self) -> None:
        """Wait for what was sent and give the slots back. Safe to call twice."""
        if self._slots:
            self._memory.synchronize()
        self.forget()

    def forget(self) -> None:
        """As ``close`` where nothing can be waited for: the device is lost."""
        for slot in self._slots:
            if slot.staging is not None:
                self._memory.free(slot.staging)
        self._slots.clear()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    @contextmanager
    def _slot(self, part: Bytes) -> Iterator[_Slot]:
        """A slot that holds ``part``, used again once what is enqueued inside has ended."""
        slot = self._free_slot(part.size)
        self._fill(slot.pinned[: part.size].reshape(part.shape), part)
        yield slot
        slot.sent = Mark(self._memory.context, self._memory.stream)

    def _free_slot(self, nbytes: int) -> _Slot:
        if len(self._slots) < SLOTS:
            self._slots.append(_Slot(self._memory.pinned.take(max(SLOT_BYTES, nbytes))))
        self._next = (self._next + 1) % len(self._slots)
        slot = self._slots[self._next]
        if slot.sent is not None:
            slot.sent.wait()
        if slot.pinned.size < nbytes:
            if slot.staging is not None:
                self._memory.free(slot.staging)
            slot = self._slots[self._next] = _Slot(self._memory.pinned.take(nbytes))
        return slot

    def _fill(self, target: Bytes, part: Bytes) -> None:
        """Copy with several threads: one alone is slower than the link."""
        pieces = min(COPYING_THREADS, os.cpu_count() or 1, max(1, part.size // LEAST_PIECE))
        if pieces == 1:
            np.copyto(target, part)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COPYING_THREADS, "upload")
        if len(part) < pieces:
            target, part = target.reshape(-1), np.ascontiguousarray(part).reshape(-1)
        bounds = np.linspace(0, len(part), pieces + 1).astype(int)
        ranges = [slice(a, b) for a, b in pairwise(bounds)]
        list(self._threads.map(lambda r: np.copyto(target[r], part[r]), ranges))
