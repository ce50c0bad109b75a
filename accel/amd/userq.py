"""Tier T2's driver: the graphics driver provides memory and a user queue, and takes no part
afterwards.

Linux 6.16 and newer, see ``Documentation/gpu/amdgpu/userq.rst``: the process has a doorbell, and
the firmware's scheduler reads the ring. Nothing of amdkfd is needed."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np

from accel.amd import uapi_drm as drm
from accel.amd.device import SIMULATE, QueueMemory, chosen, opened, small_bar
from accel.amd.kernel import Kernel
from accel.amd.pm4 import IB_INHERIT_COMPUTE, IB_VALID, signal_driver
from accel.amd.topology import PAGE, architecture
from accel.amd.uapi import Request
from accel.amd.uapi_drm import Create, Domain, Page, Query
from contract.arrays import Records
from contract.errors import TierUnavailable

TIER = "t2"
DRI = "/dev/dri"
NO_RENDER_NODE = f"there is no render node in {DRI}"
MAPPING_SECONDS = 60.0
"""Longest duration of a change of page tables."""
SETTLE_SECONDS = 10.0
WHOLE = Page.READABLE | Page.WRITEABLE | Page.EXECUTABLE
NO_QUEUE = (errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP, drm.NOT_SUPPORTED)
BOOT = "boot with amdgpu.user_queue=1, with newest firmware and CONFIG_DRM_AMDGPU_NAVI3X_USERQ"


@dataclass(frozen=True, slots=True)
class _Node:
    """A render node of the graphics driver."""

    path: str
    file: int
    version: tuple[int, int]
    architecture: str


class UserQueues:
    """See ``device.Driver``; the first GPU with kernels whose name contains ``requested``. Raises
    TierUnavailable saying what is missing."""

    tier = TIER
    rsrc1 = 0

    def __init__(self, kernel: Kernel, requested: str) -> None:
        self._kernel = kernel
        self._point = 0
        with ExitStack() as undo:
            nodes = list(self._nodes(undo))
            node = chosen(TIER, [(n.architecture, n.architecture, n) for n in nodes], requested)
            self._file = node.file
            self.gpu = self.architecture = node.architecture
            self.version = f"amdgpu {node.version[0]}.{node.version[1]}"
            _check_version(node.version)
            self.offered = self._offered()
            try:
                self.memory_bytes = self._visible()
                self._timeline = int(self.call(drm.SYNCOBJ_CREATE)["handle"][0])
                undo.callback(self.call, drm.SYNCOBJ_DESTROY, handle=self._timeline)
            except OSError as error:
                reason = f"{self.gpu} cannot be used: {error}"
                raise TierUnavailable(TIER, reason, "free the GPU, or see dmesg") from None
            self._undo = undo.pop_all()

    def make(self, address: int, nbytes: int, own: bool) -> int:
        domain = Domain.VRAM if own else Domain.GTT
        flags = Create.CPU_ACCESS_REQUIRED if own else Create.COHERENT
        with ExitStack() as undo:
            handle = self.create(nbytes, domain, flags)
            undo.callback(self.call, drm.GEM_CLOSE, handle=handle)
            self.map(handle, address, nbytes)
            self._map_for_gpu(handle, address, nbytes)
            undo.pop_all()
        return handle

    def drop(self, handle: int, address: int, nbytes: int) -> None:
        """See ``device.Driver``. Closing an object also unmaps it."""
        self.call(drm.GEM_CLOSE, handle=handle)

    def create_queue(self, memory: QueueMemory) -> UserQueue:
        return UserQueue(self, self._kernel, memory)

    def close(self) -> None:
        self._undo.close()

    def call(self, request: Request, **values: int) -> Records:
        """Make one request, and return its changed argument. Raises OSError."""
        return _called(self._kernel, self._file, request, **values)

    def ask(self, query: Query, answer: np.dtype[np.void]) -> Records:
        """The answer of INFO, for compute engines where it distinguishes them. Raises OSError."""
        return _info(self._kernel, self._file, query, answer)

    def create(self, nbytes: int, domain: Domain, flags: int = 0) -> int:
        """The handle of a new object that is not mapped yet."""
        made = self.call(
            drm.GEM_CREATE, bo_size=nbytes, alignment=PAGE, domains=domain, domain_flags=flags
        )
        return int(made.view(np.uint32)[0])

    def map(self, handle: int, address: int, nbytes: int) -> int:
        """Map an object for the host, at ``address`` or anywhere if that is 0."""
        offset = int(self.call(drm.GEM_MMAP, handle=handle).view(np.uint64)[0])
        return self._kernel.map(address, nbytes, self._file, offset)

    def refusal(self, error: OSError) -> OSError | TierUnavailable:
        """The error for a queue that could not be created."""
        if error.errno not in NO_QUEUE:
            return error
        return TierUnavailable(TIER, f"{self.gpu}: {self.offered or error}", BOOT)

    def _nodes(self, undo: ExitStack) -> Iterator[_Node]:
        """The nodes of amdgpu. An error opening a node is raised only if there is no other."""
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [n for n in self._kernel.names(DRI) if n.startswith("renderD")]
        if not names:
            raise TierUnavailable(TIER, NO_RENDER_NODE, f"load the amdgpu driver; {SIMULATE}")
        closed = None
        found = 0
        for name in names:
            path = f"{DRI}/{name}"
            try:
                file = opened(TIER, self._kernel.open, path)
            except TierUnavailable as error:
                closed = error
                continue
            undo.callback(self._kernel.close, file)
            if node := _node(self._kernel, path, file):
                found += 1
                yield node
        if not found and closed is not None:
            raise closed

    def _offered(self) -> str:
        """The reason why the kernel offers no compute queue, if it reports one. This is not always
        right, so it is reported only when creating a queue fails."""
        with suppress(OSError):
            slots = int(self.ask(Query.HW_IP_INFO, drm.HW_IP)["userq_num_slots"][0])
            mask = int(self.ask(Query.DEV_INFO, drm.DEVICE)["userq_ip_mask"][0])
            if not slots:
                return "compute_userq_slots_missing: the kernel offers no slot for user queues"
            if not mask >> drm.IP_COMPUTE & 1:
                return "the kernel offers no user queues for compute"
        return ""

    def _visible(self) -> int:
        heaps = self.ask(Query.MEMORY, drm.MEMORY)
        if int(heaps["visible"][0]) < int(heaps["vram"][0]):
            raise small_bar(TIER, self.gpu)
        return int(heaps["vram"][0])

    def _map_for_gpu(self, handle: int, address: int, nbytes: int) -> None:
        """Map memory for the GPU, and wait until the page tables have it."""
        self._point += 1
        self.call(
            drm.GEM_VA,
            handle=handle,
            operation=drm.VA_MAP,
            flags=WHOLE,
            va_address=address,
            map_size=nbytes,
            vm_timeline_point=self._point,
            vm_timeline_syncobj_out=self._timeline,
        )
        handles, points = np.array([self._timeline], np.uint32), np.array([self._point], np.uint64)
        self.call(
            drm.SYNCOBJ_TIMELINE_WAIT,
            handles=handles.ctypes.data,
            points=points.ctypes.data,
            timeout_nsec=_deadline(MAPPING_SECONDS),
            count_handles=1,
            flags=drm.WAIT_ALL | drm.WAIT_FOR_SUBMIT,
        )


class UserQueue:
    """See ``device.DriverQueue``. Raises OSError, and TierUnavailable if there are none."""

    buffer_flags = IB_VALID | IB_INHERIT_COMPUTE
    last_words: Sequence[int] = tuple(signal_driver())

    def __init__(self, driver: UserQueues, kernel: Kernel, memory: QueueMemory) -> None:
        self._driver = driver
        self._kernel = kernel
        eop = memory.more("end-of-pipe buffer", self._eop_bytes())
        descriptor = np.array([eop.address], np.uint64)
        assert descriptor.nbytes == drm.MQD_BYTES
        with ExitStack() as undo:
            doorbells = driver.create(PAGE, Domain.DOORBELL)
            undo.callback(driver.call, drm.GEM_CLOSE, handle=doorbells)
            address = driver.map(doorbells, 0, PAGE)
            undo.callback(kernel.unmap, address, PAGE)
            self.doorbell = kernel.view(address, PAGE).view(np.uint64)[:1]
            try:
                created = driver.call(
                    drm.USERQ,
                    op=drm.USERQ_CREATE,
                    ip_type=drm.IP_COMPUTE,
                    doorbell_handle=doorbells,
                    queue_va=memory.ring.address,
                    queue_size=memory.ring.nbytes,
                    rptr_va=memory.read.address,
                    wptr_va=memory.write.address,
                    mqd=descriptor.ctypes.data,
                    mqd_size=descriptor.nbytes,
                )
            except OSError as error:
                raise driver.refusal(error) from None
            self._number = int(created.view(np.uint32)[0])
            undo.callback(driver.call, drm.USERQ, op=drm.USERQ_FREE, queue_id=self._number)
            context = driver.call(drm.CTX, op=drm.CTX_ALLOC)
            self._context = int(context.view(np.uint32)[0])
            undo.callback(driver.call, drm.CTX, op=drm.CTX_FREE, ctx_id=self._context)
            self._undo = undo.pop_all()

    def fault(self) -> str:
        state = self._driver.call(drm.CTX, op=drm.CTX_QUERY_STATE2, ctx_id=self._context)
        fault = self._driver.ask(Query.GPUVM_FAULT, drm.FAULT)
        if int(fault["status"][0]):
            address = int(fault["addr"][0])
            return f"the GPU met a fault at {address:#x} ({self._kernel.complaint()})"
        if int(state.view(np.uint64)[0]) & drm.CTX_RESET:
            return f"the GPU was reset ({self._kernel.complaint()})"
        return ""

    def settle(self) -> None:
        """See ``device.DriverQueue``: wait for a fence of the driver at the current write
        pointer."""
        made = self._driver.call(drm.SYNCOBJ_CREATE)
        handles = made["handle"].copy()
        try:
            self._driver.call(
                drm.USERQ_SIGNAL,
                queue_id=self._number,
                syncobj_handles=handles.ctypes.data,
                num_syncobj_handles=1,
            )
            self._driver.call(
                drm.SYNCOBJ_WAIT,
                handles=handles.ctypes.data,
                timeout_nsec=_deadline(SETTLE_SECONDS),
                count_handles=1,
                flags=drm.WAIT_ALL,
            )
        finally:
            self._driver.call(drm.SYNCOBJ_DESTROY, handle=int(handles[0]))

    def close(self) -> None:
        self._undo.close()

    def _eop_bytes(self) -> int:
        with suppress(OSError):
            return max(int(self._driver.ask(Query.UQ_FW_AREAS, drm.AREAS)["eop_size"][0]), PAGE)
        return drm.EOP_BYTES


def _node(kernel: Kernel, path: str, file: int) -> _Node | None:
    """The description of a render node, None for that of another driver."""
    name = np.zeros(16, np.uint8)
    try:
        version = _called(kernel, file, drm.VERSION, name_len=name.nbytes, name=name.ctypes.data)
        if name.tobytes().rstrip(b"\0") != b"amdgpu":
            return None
        found = int(_info(kernel, file, Query.HW_IP_INFO, drm.HW_IP)["ip_discovery_version"][0])
    except OSError as error:
        raise TierUnavailable(TIER, f"{path}: {error}", "see dmesg") from None
    spoken = int(version["version_major"][0]), int(version["version_minor"][0])
    return _Node(path, file, spoken, architecture(found >> 16, found >> 8 & 0xFF, found & 0xFF))


def _called(kernel: Kernel, file: int, request: Request, **values: int) -> Records:
    argument = request.argument(**values)
    kernel.ioctl(file, request, argument)
    return argument


def _info(kernel: Kernel, file: int, query: Query, answer: np.dtype[np.void]) -> Records:
    found = np.zeros(1, answer)
    _called(
        kernel,
        file,
        drm.INFO,
        return_pointer=found.ctypes.data,
        return_size=found.nbytes,
        query=query,
        type=drm.IP_COMPUTE,
    )
    return found


def _check_version(version: tuple[int, int]) -> None:
    if version < (drm.FIRST_MAJOR, drm.FIRST_MINOR) or version[0] > drm.FIRST_MAJOR:
        requested = f"{drm.FIRST_MAJOR}.{drm.FIRST_MINOR}"
        reason = f"amdgpu speaks {version[0]}.{version[1]}, not {requested}"
        raise TierUnavailable(TIER, reason, "update the kernel to Linux 6.16 or newer")


def _deadline(seconds: float) -> int:
    """The deadline of a wait in nanoseconds of the monotonic clock."""
    return time.monotonic_ns() + int(seconds * 1e9)
