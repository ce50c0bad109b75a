"""Stored weights on their way to the device: through page-locked memory, arranged on arrival.

Threads read parts of tensors from the file into page-locked slots, one each. Another thread has the
device copy them, in turn, from there to staging memory of their own or where they stay, look at
them, and arrange them. Whoever uploads goes on meanwhile. So no more than the slots is held twice,
and the link is kept busy. A reader does nothing but read, since threads wait for each other
whenever one runs Python.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from accel.cuda.memory import Allocation, Memory
from accel.cuda.submissions import Mark
from accel.packets.mirrors import Bytes
from accel.packets.stacks import Stack
from contract.errors import OutOfMemory
from contract.mapped import copy_bytes

Arrived = Callable[[int, int], None]
"""Called with the device address and the bytes of stored rows whose copy is enqueued, by a thread
of the uploader, to enqueue what looks at them."""

SLOT_BYTES = 16 << 20
READERS = min(12, os.cpu_count() or 1)
SLOTS = READERS + 4
"""More than are read at a time: the link is at some meanwhile."""


@dataclass(slots=True, eq=False)
class _Slot:
    """``pinned`` is page-locked memory of the size of ``staging``, made by the first who reads into
    it; ``sent`` is passed when both are free."""

    staging: Allocation
    pinned: Bytes | None = None
    sent: Mark | None = None


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is being read into a slot, and what is to be done when that is ``done``."""

    done: Future[Bytes]
    send: Callable[[_Slot, Bytes], None]
    slot: _Slot


class Uploader:
    """Copies host memory to one device. What it is given is read some time before ``finish`` ends
    and must not change until then. Memory is allocated in the caller's thread only."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._slots: list[_Slot] = []
        self._next = 0
        self._reading: deque[_Reading] = deque()
        self._jobs: deque[Future[None]] = deque()
        self._sender: ThreadPoolExecutor | None = None
        self._readers: ThreadPoolExecutor | None = None

    def copy(self, data: Bytes, target: Allocation, arrived: Arrived | None = None) -> None:
        """``data``, uint8[rows, row_bytes], as it is. Raises OutOfMemory."""
        row_bytes = max(1, data.shape[1])
        step = max(1, SLOT_BYTES // row_bytes)

        def job() -> None:
            for first in range(0, len(data), step):

                def send(slot: _Slot, host: Bytes, start: int = first * row_bytes) -> None:
                    self._memory.transfer(target, host, True, start)
                    if arrived is not None:
                        arrived(target.address + start, host.size)

                part = data[first : first + step]
                self._read(partial(_same, part), send)

        self._later(job, min(step, len(data)) * data.shape[1])

    def arrange(
        self,
        stack: Stack,
        launch: Callable[[int, range], None],
        arrived: Arrived | None = None,
    ) -> None:
        """A stack in parts: ``launch(address, groups)`` has ``groups`` arranged, whose stored rows
        lie at ``address`` on the device. Raises OutOfMemory."""
        parts = stack.parts(SLOT_BYTES)

        def job() -> None:
            for groups in parts:

                def send(slot: _Slot, host: Bytes, groups: range = groups) -> None:
                    self._memory.transfer(slot.staging, host, True, 0)
                    if arrived is not None:
                        arrived(slot.staging.address, host.size)
                    launch(slot.staging.address, groups)

                self._read(partial(stack.stored, groups), send)

        self._later(job, max(map(stack.stored_bytes, parts), default=0))

    def finish(self) -> None:
        """Return when everything was enqueued. Raises the first that went wrong meanwhile; what was
        not sent then is given up."""
        self._collect(len(self._jobs))
        try:
            while self._reading:
                self._send_oldest()
        finally:
            self._give_up()

    def close(self) -> None:
        """As ``finish``, and give the slots back. Safe to call twice."""
        self.finish()
        if self._slots:
            self._memory.synchronize()
        self.forget()

    def forget(self) -> None:
        """Give up what was not enqueued yet: the device is lost."""
        for pool in (self._sender, self._readers):
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        self._sender = self._readers = None
        self._jobs.clear()
        self._reading.clear()
        for slot in self._slots:
            self._memory.free(slot.staging)
        self._slots.clear()

    def _collect(self, count: int) -> None:
        """Wait for the oldest jobs."""
        try:
            for _ in range(count):
                self._jobs.popleft().result()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Forget what is left to do, when nobody is at it any more."""
        for job in self._jobs:
            job.cancel()
        wait(self._jobs)
        wait([reading.done for reading in self._reading])
        self._jobs.clear()
        self._reading.clear()

    def _later(self, job: Callable[[], None], slot_bytes: int) -> None:
        if not slot_bytes:
            return
        if not self._slots or self._slots[0].staging.nbytes < slot_bytes:
            self.close()
            self._make_slots(max(SLOT_BYTES, slot_bytes))
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, "upload")
            self._readers = ThreadPoolExecutor(READERS, "read")
        self._collect(sum(1 for _ in takewhile(Future.done, self._jobs)))
        self._jobs.append(self._sender.submit(job))

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
            slots.append(_Slot(staging))
        self._slots, self._next = slots, 0

    def _read(self, rows: Callable[[], Bytes], send: Callable[[_Slot, Bytes], None]) -> None:
        """Begin to read rows into the next slot; ``send`` enqueues what is done with them then."""
        if len(self._reading) == min(READERS, len(self._slots)):
            self._send_oldest()
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.sent is not None:
            slot.sent.wait()
        assert self._readers is not None
        done = self._readers.submit(self._read_into, slot, rows)
        self._reading.append(_Reading(done, send, slot))

    def _send_oldest(self) -> None:
        reading = self._reading.popleft()
        slot, stream = reading.slot, self._memory.stream
        reading.send(slot, reading.done.result())
        if slot.sent is None:
            slot.sent = Mark(self._memory.context, stream)
        else:
            slot.sent.move(stream)

    def _read_into(self, slot: _Slot, rows: Callable[[], Bytes]) -> Bytes:
        if slot.pinned is None:
            slot.pinned = self._memory.pinned.take(slot.staging.nbytes)
        part = rows()
        host = slot.pinned[: part.size]
        copy_bytes(host.reshape(part.shape), part)
        return host


def _same(part: Bytes) -> Bytes:
    return part
