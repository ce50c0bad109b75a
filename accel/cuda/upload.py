"""Stored weights on their way to the device: through page-locked memory, arranged on arrival.

Threads share the parts of all tensors: one reads a part from the file into a page-locked slot, and
has the device copy it from there to staging memory of its own or where it stays, look at it, and
arrange it. Whoever uploads goes on meanwhile. So no more than the slots is held twice, and the link
is kept busy. Parts are large, since threads wait for each other whenever one runs Python.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from queue import SimpleQueue

from accel.cuda.memory import Allocation, Memory
from accel.cuda.submissions import Mark
from accel.packets.mirrors import Bytes
from accel.packets.stacks import Stack
from contract.errors import OutOfMemory
from contract.mapped import copy_bytes

Arrived = Callable[[int, int], None]
"""Called with the device address and the bytes of stored rows whose copy is enqueued, by several
threads, to enqueue what looks at them."""

SLOT_BYTES = 8 << 20
THREADS = min(16, os.cpu_count() or 1)
SLOTS = THREADS + THREADS // 2
"""More than there are threads: the link is at some while all threads read."""


@dataclass(slots=True, eq=False)
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
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self._jobs: deque[Future[None]] = deque()
        self._threads: ThreadPoolExecutor | None = None

    def copy(self, data: Bytes, target: Allocation, arrived: Arrived | None = None) -> None:
        """``data``, uint8[rows, row_bytes], as it is. Raises OutOfMemory."""
        row_bytes = max(1, data.shape[1])
        step = max(1, SLOT_BYTES // row_bytes)
        for first in range(0, len(data), step):
            part = data[first : first + step]

            def send(slot: _Slot, host: Bytes, start: int = first * row_bytes) -> None:
                self._memory.transfer(target, host, True, start)
                if arrived is not None:
                    arrived(target.address + start, host.size)

            self._later(partial(_same, part), part.size, send)

    def arrange(
        self,
        stack: Stack,
        launch: Callable[[int, range], None],
        arrived: Arrived | None = None,
    ) -> None:
        """A stack in parts: ``launch(address, groups)`` has ``groups`` arranged, whose stored rows
        lie at ``address`` on the device. Raises OutOfMemory."""
        for groups in stack.parts(SLOT_BYTES):

            def send(slot: _Slot, host: Bytes, groups: range = groups) -> None:
                self._memory.transfer(slot.staging, host, True, 0)
                if arrived is not None:
                    arrived(slot.staging.address, host.size)
                launch(slot.staging.address, groups)

            rows = stack.first_row(groups.stop) - stack.first_row(groups.start)
            self._later(partial(stack.stored, groups), rows * stack.data.shape[-1], send)

    def finish(self) -> None:
        """Return when everything was enqueued. Raises the first that went wrong meanwhile, in the
        order of uploads; what is not under way then is given up."""
        self._collect(len(self._jobs))

    def close(self) -> None:
        """As ``finish``, and give the slots back. Safe to call twice."""
        self.finish()
        if self._slots:
            self._memory.synchronize()
        self.forget()

    def forget(self) -> None:
        """Give up what was not enqueued yet: the device is lost."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._threads = None
        self._jobs.clear()
        for slot in self._slots:
            self._memory.free(slot.staging)
        self._slots.clear()

    def _collect(self, count: int) -> None:
        """Wait for the oldest jobs."""
        try:
            for _ in range(count):
                self._jobs.popleft().result()
        except BaseException:
            for job in self._jobs:
                job.cancel()
            wait(self._jobs)
            self._jobs.clear()
            raise

    def _later(
        self, rows: Callable[[], Bytes], nbytes: int, send: Callable[[_Slot, Bytes], None]
    ) -> None:
        """``send`` enqueues what is done with the rows, which are read by another thread."""
        if not nbytes:
            return
        if not self._slots or self._slots[0].pinned.size < nbytes:
            self.close()
            self._make_slots(max(SLOT_BYTES, nbytes))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "upload")
        self._collect(sum(1 for _ in takewhile(Future.done, self._jobs)))
        self._jobs.append(self._threads.submit(self._send, rows, send))

    def _make_slots(self, nbytes: int) -> None:
        """As many as there is memory for, at least one. Raises OutOfMemory."""
        slots: list[_Slot] = []
        while len(slots) < SLOTS:
            try:
                staging = self._memory.allocate("staging of weights", nbytes, zeroed=False)
            except OutOfMemory:
                if not slots:
                    raise
                break
            slots.append(_Slot(self._memory.pinned.take(nbytes), staging))
        self._slots, self._free = slots, SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def _send(self, rows: Callable[[], Bytes], send: Callable[[_Slot, Bytes], None]) -> None:
        slot = self._free.get()
        try:
            if slot.sent is not None:
                slot.sent.wait()
            part = rows()
            host = slot.pinned[: part.size]
            copy_bytes(host.reshape(part.shape), part)
            send(slot, host)
            if slot.sent is None:
                slot.sent = Mark(self._memory.context, self._memory.stream)
            else:
                slot.sent.move(self._memory.stream)
        finally:
            self._free.put(slot)


def _same(part: Bytes) -> Bytes:
    return part
