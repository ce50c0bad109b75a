"""Uploads weights to the device through page-locked memory; the device arranges them on arrival.

Reader threads read parts of tensors from the file into page-locked slots. A sender thread enqueues,
for each part, the copy to staging memory or to its final address, the check for finite values, and
the arranging. The caller continues meanwhile. Only the slots exist twice, and the link is always
busy. Readers run hardly any Python, since only one thread runs Python at a time; parts pass through
queues implemented in C."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread

from accel.cuda.memory import Allocation, Memory
from accel.cuda.submissions import Mark
from accel.packets.stacks import Stack
from contract.arrays import Bytes
from contract.errors import OutOfMemory
from contract.file_reads import copy_bytes
from contract.processors import processors

Arrived = Callable[[int, int], None]
"""Called by a thread of the uploader with the device address and the bytes of stored rows whose
copy is enqueued, to enqueue checks of them."""

SLOT_BYTES = 16 << 20
READERS = min(12, processors())
SLOTS = READERS + 4
"""Slots: some more than readers, since the link is copying from others."""


@dataclass(slots=True, eq=False)
class _Slot:
    """``pinned`` is page-locked memory of the size of ``staging``, made by the first reader that
    uses it; both are free once ``sent`` is passed."""

    staging: Allocation
    pinned: Bytes | None = None
    sent: Mark | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows to be read into a slot, and the function that enqueues what is done with them."""

    rows: Callable[[], Bytes]
    send: Callable[[_Slot, Bytes], None]


@dataclass(frozen=True, slots=True)
class _Read:
    """The ``rows`` of a part in a slot, or the error by which reading them ``failed``."""

    part: _Part
    slot: _Slot
    rows: Bytes | None
    failed: BaseException | None = None


class Uploader:
    """Copies host memory to one device. Data must not change before ``finish`` returns. Only the
    caller's thread allocates memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._slots: list[_Slot] = []
        self._readers: list[Thread] = []
        self._sender: Thread | None = None
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self._read: SimpleQueue[_Read | None] = SimpleQueue()
        self._ended = Condition()
        self._left = 0
        self._failed: BaseException | None = None
        self._ahead: deque[Future[Bytes]] | None = None

    def prepare(self, nbytes: int) -> None:
        """At the first call, start making page-locked memory for uploads of ``nbytes`` bytes and
        return at once; it takes as long as uploading some gigabytes."""
        if self._ahead is None:
            count = min(SLOTS, -(-nbytes // SLOT_BYTES))
            pool = ThreadPoolExecutor(READERS, "lock pages")
            take = self._memory.pinned.take
            self._ahead = deque(pool.submit(take, SLOT_BYTES) for _ in range(count))
            pool.shutdown(wait=False)

    def copy(self, data: Bytes, target: Allocation, arrived: Arrived | None = None) -> None:
        """Copy ``data``, uint8[rows, row_bytes], unchanged. Raises OutOfMemory."""
        row_bytes = max(1, data.shape[1])
        step = max(1, SLOT_BYTES // row_bytes)
        parts = []
        for first in range(0, len(data), step):

            def send(slot: _Slot, host: Bytes, start: int = first * row_bytes) -> None:
                self._memory.transfer(target, host, True, start)
                if arrived is not None:
                    arrived(target.address + start, host.size)
                self._memory.copy_back(target, start, host.size)

            parts.append(_Part(partial(_same, data[first : first + step]), send))
        self._begin(parts, min(step, len(data)) * data.shape[1])

    def arrange(
        self, stack: Stack, launch: Callable[[int, range], None], arrived: Arrived | None = None
    ) -> None:
        """Copy a stack in parts: ``launch(address, groups)`` enqueues the arranging of ``groups``,
        whose stored rows lie at ``address`` on the device. Raises OutOfMemory."""
        cut = stack.parts(SLOT_BYTES)
        parts = []
        for groups in cut:

            def send(slot: _Slot, host: Bytes, groups: range = groups) -> None:
                self._memory.transfer(slot.staging, host, True, 0)
                if arrived is not None:
                    arrived(slot.staging.address, host.size)
                launch(slot.staging.address, groups)

            parts.append(_Part(partial(stack.stored, groups), send))
        self._begin(parts, max(map(stack.stored_bytes, cut), default=0))

    def finish(self) -> None:
        """Return when everything is enqueued. Raises the first error of the threads; parts not sent
        by then are dropped."""
        try:
            self._wait()
        except BaseException as interrupt:
            self._failed = interrupt
            self._wait()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """As ``finish``, then free the slots. Safe to call twice."""
        self.finish()
        if self._slots:
            self._memory.synchronize()
        self.forget()

    def forget(self) -> None:
        """Drop what is not enqueued yet, because the device is lost."""
        self._failed = Forgotten()
        self._wait()
        for _ in self._readers:
            self._parts.put(None)
        for thread in self._readers:
            thread.join()
        if self._sender is not None:
            self._read.put(None)
            self._sender.join()
        self._readers, self._sender, self._failed = [], None, None
        if self._ahead:
            wait(self._ahead)
            self._ahead.clear()
        for slot in self._slots:
            self._memory.free(slot.staging)
        self._slots, self._free = [], SimpleQueue()

    def _begin(self, parts: list[_Part], slot_bytes: int) -> None:
        """Have parts read and sent, none of which has more than ``slot_bytes``."""
        if not slot_bytes:
            return
        if self._failed is not None:
            self.finish()
        if not self._slots or self._slots[0].staging.nbytes < slot_bytes:
            self.close()
            self._make_slots(max(SLOT_BYTES, slot_bytes))
        if self._sender is None:
            self._sender = Thread(target=self._send_all, name="upload", daemon=True)
            named = (f"read {number}" for number in range(min(READERS, len(self._slots))))
            self._readers = [Thread(target=self._read_all, name=n, daemon=True) for n in named]
            for thread in (self._sender, *self._readers):
                thread.start()
        with self._ended:
            self._left += len(parts)
        for part in parts:
            self._parts.put(part)

    def _make_slots(self, nbytes: int) -> None:
        """Allocate as many slots as there is memory for, at least one. Raises OutOfMemory."""
        slots: list[_Slot] = []
        while len(slots) < SLOTS:
            try:
                staging = self._memory.allocate("staging of weights", nbytes, zeroed=False)
            except OutOfMemory:
                if not slots:
                    raise
                break
            slots.append(_Slot(staging))
        self._slots = slots
        for slot in slots:
            self._free.put(slot)

    def _wait(self) -> None:
        with self._ended:
            self._ended.wait_for(lambda: not self._left)

    def _read_all(self) -> None:
        """The loop of a reader thread."""
        while (part := self._parts.get()) is not None:
            slot = self._free.get()
            rows, failed = None, None
            if self._failed is None:
                try:
                    rows = self._read_into(slot, part)
                except BaseException as error:
                    failed = error
            self._read.put(_Read(part, slot, rows, failed))

    def _read_into(self, slot: _Slot, part: _Part) -> Bytes:
        if slot.sent is not None:
            slot.sent.wait()
        if slot.pinned is None:
            slot.pinned = self._page_locked(slot.staging.nbytes)
        stored = part.rows()
        host = slot.pinned[: stored.size]
        copy_bytes(host.reshape(stored.shape), stored)
        return host

    def _page_locked(self, nbytes: int) -> Bytes:
        with suppress(IndexError):
            while self._ahead:
                made = self._ahead.popleft().result()
                if made.nbytes == nbytes:
                    return made
        return self._memory.pinned.take(nbytes)

    def _send_all(self) -> None:
        """The loop of the sender thread."""
        while (read := self._read.get()) is not None:
            try:
                if read.failed is not None:
                    raise read.failed
                if read.rows is not None and self._failed is None:
                    self._send(read.part, read.slot, read.rows)
            except BaseException as error:
                self._failed = error if self._failed is None else self._failed
            self._free.put(read.slot)
            with self._ended:
                self._left -= 1
                if not self._left:
                    self._ended.notify_all()

    def _send(self, part: _Part, slot: _Slot, rows: Bytes) -> None:
        stream = self._memory.stream
        part.send(slot, rows)
        if slot.sent is None:
            slot.sent = Mark(self._memory.context, stream)
        else:
            slot.sent.move(stream)


class Forgotten(Exception):
    """A part was dropped because the device is lost."""


def _same(part: Bytes) -> Bytes:
    return part
