"""A GPU through amdkfd: its memory, and one compute queue that is fed without the kernel."""

from __future__ import annotations

import errno
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.amd import uapi
from accel.amd.kernel import Bytes, Kernel
from accel.amd.topology import PAGE, SUPPORTED, Gpu, gpus
from accel.amd.uapi import Memory
from contract.errors import OutOfMemory, TierUnavailable

TIER = "t1"
KFD = "/dev/kfd"
DOORBELL_BYTES = 8192

VRAM = Memory.VRAM | Memory.PUBLIC | Memory.WRITABLE | Memory.EXECUTABLE | Memory.NO_SUBSTITUTE
GTT = Memory.GTT | Memory.WRITABLE | Memory.EXECUTABLE | Memory.COHERENT | Memory.NO_SUBSTITUTE


@dataclass(slots=True, eq=False)
class Allocation:
    """``nbytes`` of memory at an ``address`` that is the host's as well as the GPU's."""

    address: int
    nbytes: int
    reserved: int
    handle: int
    device: bool
    host: Bytes


class KfdDevice:
    """An opened GPU. Sizes in bytes; ``held`` is its own memory that is allocated.

    Raises TierUnavailable saying what is missing.
    """

    def __init__(self, kernel: Kernel, wanted: str, most_bytes: int | None = None) -> None:
        self.kernel = kernel
        self.held = 0
        self._allocations: set[Allocation] = set()
        with ExitStack() as undo:
            self._file = _opened(kernel, KFD)
            undo.callback(kernel.close, self._file)
            version = uapi.GET_VERSION.argument()
            kernel.ioctl(self._file, uapi.GET_VERSION, version)
            self.version = int(version["major_version"][0]), int(version["minor_version"][0])
            _check_version(self.version)
            self.gpu = _chosen(kernel, wanted)
            self.capacity = min(self.gpu.memory_bytes, most_bytes or self.gpu.memory_bytes)
            self._render = _opened(kernel, self.gpu.render_node)
            undo.callback(kernel.close, self._render)
            try:
                self._acquire()
            except OSError as error:
                reason = f"{self.gpu.name} cannot be used: {error}"
                raise TierUnavailable(TIER, reason, "free the GPU, or see dmesg") from None
            self._undo = undo.pop_all()

    @property
    def name(self) -> str:
        """What a user is told."""
        return f"{self.gpu.name} (simulated)" if self.kernel.simulated else self.gpu.name

    @property
    def driver(self) -> str:
        """The kernel's driver."""
        return f"amdkfd {self.version[0]}.{self.version[1]}"

    @property
    def available(self) -> int:
        """Bytes of its own memory that can still be had."""
        return self.capacity - self.held

    def allocate(self, what: str, nbytes: int, device: bool = True) -> Allocation:
        """Memory of the GPU's own, or host memory it sees. Raises OutOfMemory naming ``what``."""
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        if device and size > self.available:
            raise OutOfMemory(what, size, self.held, self.available)
        flags = VRAM if device else GTT
        with ExitStack() as undo:
            try:
                address = self.kernel.reserve(size)
                undo.callback(self.kernel.unmap, address, size)
                argument = uapi.ALLOC_MEMORY_OF_GPU.argument(
                    va_addr=address, size=size, gpu_id=self.gpu.gpu_id, flags=flags
                )
                self.kernel.ioctl(self._file, uapi.ALLOC_MEMORY_OF_GPU, argument)
                handle = int(argument["handle"][0])
                undo.callback(self._release, handle)
                self.kernel.map(address, size, self._render, int(argument["mmap_offset"][0]))
                self._set_mapped(uapi.MAP_MEMORY_TO_GPU, handle)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise OutOfMemory(what, size, self.held, self.available) from None
            undo.pop_all()
        self.held += size if device else 0
        host = self.kernel.view(address, size)
        allocation = Allocation(address, nbytes, size, handle, device, host[:nbytes])
        self._allocations.add(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give memory back that nothing uses any more."""
        self._allocations.remove(allocation)
        self._set_mapped(uapi.UNMAP_MEMORY_FROM_GPU, allocation.handle)
        self._release(allocation.handle)
        self.kernel.unmap(allocation.address, allocation.reserved)
        self.held -= allocation.reserved if allocation.device else 0

    def call(self, request: uapi.Request, **values: int) -> NDArray[np.void]:
        """One request to amdkfd; its argument after it. Raises OSError."""
        argument = request.argument(**values)
        self.kernel.ioctl(self._file, request, argument)
        return argument

    def map_doorbell(self, offset: int) -> tuple[int, NDArray[np.uint64]]:
        """Where the page of doorbells is mapped, and the queue's."""
        page = offset & ~(DOORBELL_BYTES - 1)
        address = self.kernel.map(0, DOORBELL_BYTES, self._file, page)
        words = self.kernel.view(address, DOORBELL_BYTES).view(np.uint64)
        return address, words[offset % DOORBELL_BYTES // 8 :]

    def close(self) -> None:
        """Give all memory back, of which nothing may run any more, and the files."""
        with self._undo:
            for allocation in list(self._allocations):
                self.free(allocation)

    def _acquire(self) -> None:
        apertures = np.zeros(56, np.uint8)
        self.call(
            uapi.GET_PROCESS_APERTURES_NEW,
            kfd_process_device_apertures_ptr=apertures.ctypes.data,
            num_of_nodes=1,
        )
        self.call(uapi.ACQUIRE_VM, drm_fd=self._render, gpu_id=self.gpu.gpu_id)
        if self.version >= (1, uapi.RUNTIME_ENABLE_MINOR):
            self.call(uapi.RUNTIME_ENABLE)

    def _release(self, handle: int) -> None:
        self.call(uapi.FREE_MEMORY_OF_GPU, handle=handle)

    def _set_mapped(self, request: uapi.Request, handle: int) -> None:
        ids = np.array([self.gpu.gpu_id], np.uint32)
        argument = self.call(
            request, handle=handle, device_ids_array_ptr=ids.ctypes.data, n_devices=1
        )
        if int(argument["n_success"][0]) != 1:
            raise OSError(errno.EIO, f"{request.name}: not done")


NO_FILE = "there is no {path}"
NO_AMDKFD = NO_FILE.format(path=KFD)
SIMULATE = "--device simulated needs no GPU"
REMEDIES = {
    errno.ENOENT: (NO_FILE, f"load the amdgpu driver; {SIMULATE}"),
    errno.EACCES: ("{path} may not be opened", "add yourself to the groups render and video"),
    errno.EAGAIN: ("the GPU is being reset", "try again in a few seconds"),
}


def _opened(kernel: Kernel, path: str) -> int:
    try:
        return kernel.open(path)
    except OSError as error:
        known = REMEDIES.get(error.errno or 0)
        if known is None:
            raise TierUnavailable(TIER, f"{path}: {error}", "see dmesg") from None
        raise TierUnavailable(TIER, known[0].format(path=path), known[1]) from None


def _check_version(version: tuple[int, int]) -> None:
    if version < (uapi.FIRST_MAJOR, uapi.FIRST_MINOR) or version[0] > uapi.FIRST_MAJOR:
        wanted = f"{uapi.FIRST_MAJOR}.{uapi.FIRST_MINOR}"
        found = f"{version[0]}.{version[1]}"
        raise TierUnavailable(TIER, f"amdkfd speaks {found}, not {wanted}", "update the kernel")


def _chosen(kernel: Kernel, wanted: str) -> Gpu:
    """The first GPU there is code for whose name has ``wanted`` in it."""
    found: list[Gpu] = []
    with suppress(FileNotFoundError):
        found = list(gpus(kernel))
    named = [gpu for gpu in found if wanted.lower() in gpu.name.lower()]
    fitting = [gpu for gpu in named if gpu.target in SUPPORTED]
    if fitting and not fitting[0].memory_bytes:
        reason = f"the host does not see all memory of {fitting[0].name}"
        raise TierUnavailable(TIER, reason, "enable resizable BAR in the firmware's settings")
    if fitting:
        return fitting[0]
    known = ", ".join(SUPPORTED.values())
    if named:
        listed = ", ".join(f"{gpu.name} ({gpu.architecture})" for gpu in named)
        raise TierUnavailable(TIER, f"no kernels for {listed}", f"there are some for {known}")
    listed = ", ".join(gpu.name for gpu in found) or "none"
    reason = f"no AMD GPU is named {wanted!r}" if wanted else "there is no AMD GPU"
    raise TierUnavailable(TIER, reason, f"GPUs here: {listed}; {SIMULATE}")
