"""A compute queue that needs only writes to memory: ring, write pointer, doorbell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol

import numpy as np

from accel.amd import pm4
from accel.amd.device import Allocation, Device, QueueMemory
from accel.amd.topology import PAGE
from accel.packets.in_flight import POLL_SECONDS
from contract.errors import DeviceLost

RING_BYTES = 64 << 10
FAULT_CHECK_SECONDS = 0.02
"""Time between two checks for a GPU fault while a fence is awaited."""
FULL_RING_SECONDS = 600.0
GRACE_SECONDS = 1.0
"""Longest wait for a queue that was told to skip what it has not begun."""
GO_AT = 64
"""Offset of the word that packets check in the page of the fence; 0 makes them skip what
follows."""


class Observer(Protocol):
    """Observes every submission, see ``accel/amd/tools/trace.py``."""

    def before(self) -> None:
        """The ring is about to be written."""

    def after(self, words: Sequence[int]) -> None:
        """The ring was written and the doorbell rung."""


class Queue:
    """A ring of packets; ``number`` is that of the last submission. Raises OSError."""

    observer: Observer | None = None

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernel = device.kernel
        self.own_memory: set[int] = set()
        with ExitStack() as undo:
            self._undo = undo
            ring = self._memory("ring", RING_BYTES)
            write, read = (self._memory(f"{name} pointer", PAGE) for name in ("write", "read"))
            fence = self._memory("fence", PAGE)
            self._ring = ring.host.view(np.uint32)
            self._write, self._read = (one.host[:8].view(np.uint64) for one in (write, read))
            self.fence_address = fence.address
            self.go_address = fence.address + GO_AT
            self._fence = fence.host[:8].view(np.uint64)
            self._go = fence.host[GO_AT : GO_AT + 4].view(np.uint32)
            self._go[0] = 1
            memory = QueueMemory(ring, write, read, self._memory)
            self._driver = device.driver.create_queue(memory)
            undo.callback(self._driver.close)
            self.own_memory.remove(fence.address)
            self.number = 0
            self._closed = False
            self._submitted = 0
            self._checked = 0.0
            self._undo = undo.pop_all()

    @property
    def fence(self) -> int:
        """The number of the last submission that has ended."""
        self._kernel.idle()
        return int(self._fence[0])

    def submit(self, words: Sequence[int]) -> int:
        """Submit packets and a fence, and return the fence's number; waits while the ring is full.
        Raises DeviceLost."""
        self.number += 1
        words = [*words, *self.release(self.fence_address, self.number)]
        if len(words) > self._free_words:
            self._until(lambda: len(words) <= self._free_words, FULL_RING_SECONDS)
        if self.observer is not None:
            self.observer.before()
        self._write_words(words)
        if self.observer is not None:
            self.observer.after(words)
        return self.number

    def release(self, address: int, value: int) -> pm4.Words:
        """The packet that writes 64 bits once everything has ended and is written back."""
        caches = self._device.generation.caches
        return pm4.release_memory(address, value, caches=caches.release)

    def acquire(self, level: bool = False) -> pm4.Words:
        """Wait for all launches, then show their writes to those that follow, and the host's writes
        too unless both belong to one step (``level``)."""
        caches = self._device.generation.caches
        chosen = caches.acquire_level if level else caches.acquire_all
        return [*pm4.wait_for_launches(), *pm4.acquire_memory(chosen)]

    def indirect_buffer(self, address: int, words: int) -> pm4.Words:
        """The packet that makes the queue execute ``words`` words at ``address``."""
        return pm4.indirect_buffer(address, words, self._driver.buffer_flags)

    def reached(self, number: int) -> bool:
        """Whether submission ``number`` has ended. Raises DeviceLost for a fault of the GPU."""
        if self.fence >= number:
            return True
        if time.monotonic() > self._checked + FAULT_CHECK_SECONDS:
            self._checked = time.monotonic()
            if fault := self._driver.fault():
                raise DeviceLost(f"{self._device.name}: {fault}")
        return False

    def wait(self, number: int, seconds: float) -> None:
        """Return when submission ``number`` has ended. Raises DeviceLost, also after
        ``seconds``."""
        self._until(lambda: self.reached(number), seconds)

    def settle(self) -> None:
        """Wait until the driver knows that everything is done, if it has a fence.

        Everything submitted must have ended. Raises OSError."""
        if self._driver.last_words:
            self._write_words(self._driver.last_words)
            self._driver.settle()

    def cancel(self, seconds: float | None = None) -> bool:
        """Make everything submitted end as soon as possible, whatever was computed, and return
        whether it ended within ``seconds``, by default a short grace. Afterwards the queue works as
        before. Raises DeviceLost for a fault."""
        if self._closed:
            return False
        self._go[0] = 0
        deadline = time.monotonic() + (GRACE_SECONDS if seconds is None else seconds)
        while not (ended := self.reached(self.number)) and time.monotonic() <= deadline:
            time.sleep(POLL_SECONDS)
        if ended:
            self._go[0] = 1
        return ended

    def close(self) -> None:
        """Remove the queue from the GPU, running or not, and free its memory."""
        if self._closed:
            return
        self._closed = True
        with self._undo, suppress(OSError):
            if self.fence >= self.number:
                self.settle()

    def _until(self, met: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            if time.monotonic() > deadline:
                raise DeviceLost(f"{self._device.name}: nothing ended within {seconds:g} s")
            time.sleep(POLL_SECONDS)

    def _write_words(self, words: Sequence[int]) -> None:
        """Write words into the ring, and ring the doorbell."""
        size = len(self._ring)
        start = self._submitted % size
        first = min(len(words), size - start)
        self._ring[start : start + first] = words[:first]
        self._ring[: len(words) - first] = words[first:]
        self._submitted += len(words)
        # The GPU sees nothing before the write pointer moves, and that not before the doorbell.
        self._write[0] = self._submitted
        self._kernel.ring(self._driver.doorbell, self._submitted)

    @property
    def _free_words(self) -> int:
        """Free words of the ring."""
        size = len(self._ring)
        read = int(self._read.view(np.uint32)[0])
        return size - 1 - (self._submitted - read) % size

    def _memory(self, purpose: str, nbytes: int) -> Allocation:
        allocation = self._device.allocate(purpose, nbytes, device=False)
        self._undo.callback(self._device.free, allocation)
        self.own_memory.add(allocation.address)
        return allocation
