"""A compute queue that is fed by writes to memory alone: ring, write pointer, doorbell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from accel.amd import pm4, uapi
from accel.amd.kfd import DOORBELL_BYTES, Allocation, KfdDevice
from accel.amd.topology import EOP_BYTES, PAGE, Gpu
from accel.packets.under_way import POLL_SECONDS
from contract.errors import DeviceLost

RING_BYTES = 64 << 10
ASKING_SECONDS = 0.02
"""Between two questions whether the GPU met a fault, while a fence is waited for."""
FULL_RING_SECONDS = 600.0
FAULT_EVENTS = (uapi.EVENT_MEMORY, uapi.EVENT_HW_EXCEPTION)


class Queue:
    """A ring of packets; ``number`` is that of the last submission. Raises OSError."""

    def __init__(self, device: KfdDevice) -> None:
        self._device = device
        self._kernel = device.kernel
        with ExitStack() as undo:
            self._undo = undo
            ring = self._memory("ring", RING_BYTES)
            pointers = self._memory("queue pointers", PAGE)
            self._ring = ring.host.view(np.uint32)
            self._write, self._read = (pointers.host[n : n + 8].view(np.uint64) for n in (0, 64))
            fence = self._memory("fence", PAGE)
            self.fence_address = fence.address
            self._fence = fence.host[:8].view(np.uint64)
            created = self._create(device.gpu, ring.address, pointers.address)
            number = int(created["queue_id"][0])
            undo.callback(device.call, uapi.DESTROY_QUEUE, queue_id=number)
            place, self._doorbell = device.map_doorbell(int(created["doorbell_offset"][0]))
            undo.callback(self._kernel.unmap, place, DOORBELL_BYTES)
            self._events = [self._event(undo, kind) for kind in FAULT_EVENTS]
            self.number = 0
            self._submitted = 0
            self._asked = 0.0
            self._undo = undo.pop_all()

    @property
    def fence(self) -> int:
        """The number of the last submission that has ended."""
        self._kernel.idle()
        return int(self._fence[0])

    def submit(self, words: Sequence[int]) -> int:
        """Packets, then a fence, whose number this is; waits while the ring is full.

        Raises DeviceLost.
        """
        self.number += 1
        words = [*words, *pm4.release_memory(self.fence_address, self.number)]
        if len(words) > self._room:
            self._until(lambda: len(words) <= self._room, FULL_RING_SECONDS)
        self._write_words(words)
        return self.number

    def reached(self, number: int) -> bool:
        """Whether that submission has ended. Raises DeviceLost for a fault of the GPU."""
        if self.fence >= number:
            return True
        if time.monotonic() > self._asked + ASKING_SECONDS:
            self._asked = time.monotonic()
            if fault := self.fault():
                raise DeviceLost(f"{self._device.name}: {fault}")
        return False

    def wait(self, number: int, seconds: float) -> None:
        """Return when it has ended. Raises DeviceLost, also after ``seconds``."""
        self._until(lambda: self.reached(number), seconds)

    def _until(self, met: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            if time.monotonic() > deadline:
                raise DeviceLost(f"{self._device.name}: nothing ended within {seconds:g} s")
            time.sleep(POLL_SECONDS)

    def _write_words(self, words: Sequence[int]) -> None:
        """Into the ring, and ring the doorbell."""
        size = len(self._ring)
        start = self._submitted % size
        first = min(len(words), size - start)
        self._ring[start : start + first] = words[:first]
        self._ring[: len(words) - first] = words[first:]
        self._submitted += len(words)
        # Nothing is seen before the write pointer moves, and that not before the doorbell.
        self._write[0] = self._submitted
        self._kernel.ring(self._doorbell, self._submitted)

    @property
    def _room(self) -> int:
        """Words the ring can take."""
        size = len(self._ring)
        read = int(self._read.view(np.uint32)[0])
        return size - 1 - (self._submitted - read) % size

    def fault(self) -> str:
        """What the kernel reports of the queue; nothing while all is well."""
        data = np.zeros(len(self._events), uapi.EVENT_DATA)
        data["event_id"] = self._events
        found = self._device.call(
            uapi.WAIT_EVENTS, events_ptr=data.ctypes.data, num_events=len(data), timeout=0
        )
        if int(found["wait_result"][0]) != uapi.WAIT_COMPLETE:
            return ""
        for event in data:
            if event["not_present"] or event["gpu_va"]:
                address = int(event["gpu_va"])
                return f"the GPU met a fault at {address:#x} ({self._kernel.complaint()})"
        return f"the GPU was reset ({self._kernel.complaint()})"

    def close(self) -> None:
        """Take the queue from the GPU, running or not, and free what it had."""
        self._undo.close()

    def _memory(self, what: str, nbytes: int) -> Allocation:
        allocation = self._device.allocate(what, nbytes, device=False)
        allocation.host[:] = 0
        self._undo.callback(self._device.free, allocation)
        return allocation

    def _create(self, gpu: Gpu, ring: int, pointers: int) -> NDArray[np.void]:
        eop = self._memory("end-of-pipe buffer", EOP_BYTES)
        saved = self._memory("save area of waves", gpu.save_area_bytes)
        return self._device.call(
            uapi.CREATE_QUEUE,
            ring_base_address=ring,
            write_pointer_address=pointers,
            read_pointer_address=pointers + 64,
            ring_size=RING_BYTES,
            gpu_id=gpu.gpu_id,
            queue_type=uapi.QUEUE_COMPUTE,
            queue_percentage=uapi.MOST_PERCENT,
            queue_priority=uapi.PRIORITY,
            eop_buffer_address=eop.address,
            eop_buffer_size=EOP_BYTES,
            ctx_save_restore_address=saved.address,
            ctx_save_restore_size=gpu.save_bytes,
            ctl_stack_size=gpu.control_stack_bytes,
        )

    def _event(self, undo: ExitStack, kind: int) -> int:
        created = self._device.call(uapi.CREATE_EVENT, event_type=kind)
        number = int(created["event_id"][0])
        undo.callback(self._device.call, uapi.DESTROY_EVENT, event_id=number)
        return number
