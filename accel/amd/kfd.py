"""Tier T1's driver: amdkfd provides memory and a compute queue, and takes no part afterwards."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np
from numpy.typing import NDArray

from accel.amd import uapi
from accel.amd.device import QueueMemory, chosen, opened, small_bar
from accel.amd.generation import BY_ARCHITECTURE
from accel.amd.kernel import Kernel
from accel.amd.pm4 import IB_VALID
from accel.amd.topology import EOP_BYTES, Gpu, gpus
from accel.amd.uapi import Memory
from contract.arrays import Records
from contract.errors import TierUnavailable

TIER = "t1"
KFD = "/dev/kfd"
NO_AMDKFD = f"there is no {KFD}"
DOORBELL_BYTES = 8192
FAULT_EVENTS = (uapi.EVENT_MEMORY, uapi.EVENT_HW_EXCEPTION)

VRAM = Memory.VRAM | Memory.PUBLIC | Memory.WRITABLE | Memory.EXECUTABLE | Memory.NO_SUBSTITUTE
GTT = Memory.GTT | Memory.WRITABLE | Memory.EXECUTABLE | Memory.COHERENT | Memory.NO_SUBSTITUTE


class Kfd:
    """See ``device.Driver``; the first GPU with kernels whose name contains ``requested``. Raises
    TierUnavailable saying what is missing."""

    tier = TIER

    def __init__(self, kernel: Kernel, requested: str) -> None:
        self._kernel = kernel
        self._file, new = self._opened_once(KFD)
        try:
            self._interface = self._version()
            self.version = f"amdkfd {self._interface[0]}.{self._interface[1]}"
            self._node = _chosen(kernel, requested)
            self.gpu, self.architecture = self._node.name, self._node.architecture
            self.rsrc1 = BY_ARCHITECTURE[self.architecture].amdkfd_rsrc1
            self.memory_bytes = self._node.memory_bytes
            self._render, _ = self._opened_once(self._node.render_node)
            self._acquire(new)
        except OSError as error:
            reason = f"amdkfd cannot be used: {error}"
            raise TierUnavailable(TIER, reason, "free the GPU, or see dmesg") from None

    def make(self, address: int, nbytes: int, own: bool) -> int:
        with ExitStack() as undo:
            made = self.call(
                uapi.ALLOC_MEMORY_OF_GPU,
                va_addr=address,
                size=nbytes,
                gpu_id=self._node.gpu_id,
                flags=VRAM if own else GTT,
            )
            handle = int(made["handle"][0])
            undo.callback(self.call, uapi.FREE_MEMORY_OF_GPU, handle=handle)
            self._kernel.map(address, nbytes, self._render, int(made["mmap_offset"][0]))
            self._set_mapped(uapi.MAP_MEMORY_TO_GPU, handle)
            undo.pop_all()
        return handle

    def drop(self, handle: int, address: int, nbytes: int) -> None:
        self._set_mapped(uapi.UNMAP_MEMORY_FROM_GPU, handle)
        self.call(uapi.FREE_MEMORY_OF_GPU, handle=handle)

    def create_queue(self, memory: QueueMemory) -> KfdQueue:
        return KfdQueue(self, self._kernel, self._node, memory)

    def call(self, request: uapi.Request, **values: int) -> Records:
        """Make one request, and return its changed argument. Raises OSError."""
        argument = request.argument(**values)
        self._kernel.ioctl(self._file, request, argument)
        return argument

    def map_doorbell(self, offset: int) -> tuple[int, NDArray[np.uint64]]:
        """The address of the mapped page of doorbells, and the queue's doorbell."""
        page = offset & ~(DOORBELL_BYTES - 1)
        address = self._kernel.map(0, DOORBELL_BYTES, self._file, page)
        words = self._kernel.view(address, DOORBELL_BYTES).view(np.uint64)
        return address, words[offset % DOORBELL_BYTES // 8 :]

    def close(self) -> None:
        """Does nothing: amdkfd identifies a process by the files it opened first, so they stay
        open."""

    def _opened_once(self, path: str) -> tuple[int, bool]:
        """A file that stays open as long as the process runs, and whether it is new."""
        files = self._kernel.open_files
        new = path not in files
        if new:
            files[path] = opened(TIER, self._kernel.open, path)
        return files[path], new

    def _version(self) -> tuple[int, int]:
        found = self.call(uapi.GET_VERSION)
        version = int(found["major_version"][0]), int(found["minor_version"][0])
        if version < (uapi.FIRST_MAJOR, uapi.FIRST_MINOR) or version[0] > uapi.FIRST_MAJOR:
            requested = f"{uapi.FIRST_MAJOR}.{uapi.FIRST_MINOR}"
            reason = f"amdkfd speaks {version[0]}.{version[1]}, not {requested}"
            raise TierUnavailable(TIER, reason, "update the kernel")
        return version

    def _acquire(self, new: bool) -> None:
        apertures = np.zeros(56, np.uint8)
        self.call(
            uapi.GET_PROCESS_APERTURES_NEW,
            kfd_process_device_apertures_ptr=apertures.ctypes.data,
            num_of_nodes=1,
        )
        self.call(uapi.ACQUIRE_VM, drm_fd=self._render, gpu_id=self._node.gpu_id)
        if new and self._interface >= (1, uapi.RUNTIME_ENABLE_MINOR):
            self.call(uapi.RUNTIME_ENABLE)

    def _set_mapped(self, request: uapi.Request, handle: int) -> None:
        ids = np.array([self._node.gpu_id], np.uint32)
        argument = self.call(
            request, handle=handle, device_ids_array_ptr=ids.ctypes.data, n_devices=1
        )
        if int(argument["n_success"][0]) != 1:
            raise OSError(errno.EIO, f"{request.name}: not done")


class KfdQueue:
    """See ``device.DriverQueue``. Raises OSError."""

    buffer_flags = IB_VALID
    last_words: Sequence[int] = ()

    def __init__(self, driver: Kfd, kernel: Kernel, gpu: Gpu, memory: QueueMemory) -> None:
        self._driver = driver
        self._kernel = kernel
        eop = memory.more("end-of-pipe buffer", EOP_BYTES)
        saved = memory.more("save area of waves", gpu.save_area_bytes)
        with ExitStack() as undo:
            created = driver.call(
                uapi.CREATE_QUEUE,
                ring_base_address=memory.ring.address,
                write_pointer_address=memory.write.address,
                read_pointer_address=memory.read.address,
                ring_size=memory.ring.nbytes,
                gpu_id=gpu.gpu_id,
                queue_type=uapi.QUEUE_COMPUTE,
                queue_percentage=uapi.MAX_PERCENT,
                queue_priority=uapi.PRIORITY,
                eop_buffer_address=eop.address,
                eop_buffer_size=EOP_BYTES,
                ctx_save_restore_address=saved.address,
                ctx_save_restore_size=gpu.save_bytes,
                ctl_stack_size=gpu.control_stack_bytes,
            )
            number = int(created["queue_id"][0])
            undo.callback(driver.call, uapi.DESTROY_QUEUE, queue_id=number)
            address, self.doorbell = driver.map_doorbell(int(created["doorbell_offset"][0]))
            undo.callback(kernel.unmap, address, DOORBELL_BYTES)
            self._events = [self._event(undo, kind) for kind in FAULT_EVENTS]
            self._undo = undo.pop_all()

    def fault(self) -> str:
        data = np.zeros(len(self._events), uapi.EVENT_DATA)
        data["event_id"] = self._events
        found = self._driver.call(
            uapi.WAIT_EVENTS, events_ptr=data.ctypes.data, num_events=len(data), timeout=0
        )
        if int(found["wait_result"][0]) != uapi.WAIT_COMPLETE:
            return ""
        for event in data:
            if event["not_present"] or event["gpu_va"]:
                address = int(event["gpu_va"])
                return f"the GPU met a fault at {address:#x} ({self._kernel.complaint()})"
        return f"the GPU was reset ({self._kernel.complaint()})"

    def settle(self) -> None:
        """Does nothing, since amdkfd has no fence to wait for."""

    def close(self) -> None:
        self._undo.close()

    def _event(self, undo: ExitStack, kind: int) -> int:
        created = self._driver.call(uapi.CREATE_EVENT, event_type=kind)
        number = int(created["event_id"][0])
        undo.callback(self._driver.call, uapi.DESTROY_EVENT, event_id=number)
        return number


def _chosen(kernel: Kernel, requested: str) -> Gpu:
    """The first GPU with kernels whose name contains ``requested``."""
    found: list[Gpu] = []
    with suppress(FileNotFoundError):
        found = list(gpus(kernel))
    fitting = chosen(TIER, [(gpu.name, gpu.architecture, gpu) for gpu in found], requested)
    if not fitting.memory_bytes:
        raise small_bar(TIER, fitting.name)
    return fitting
