"""A simulated system with a GPU: it enforces what the real one enforces, and runs queues in this
process.

Its two drivers read the structures of ``uapi.py`` and ``uapi_drm.py`` from the bytes they get. A
launch is done when the doorbell has been rung, unless its queue waits for memory or processes a few
packets at a time: then ``idle`` continues it."""

import errno
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from accel.amd.kernel import Kernel
from accel.amd.kfd import KFD
from accel.amd.sim.fake_drm import FakeDrm
from accel.amd.sim.fake_kfd import FakeKfd
from accel.amd.sim.fake_machine import Behaviour, FakeComputer
from accel.amd.sim.memory_view import GpuFault
from accel.amd.system import RELEASE
from accel.amd.topology import NODES
from accel.amd.uapi import Request
from accel.amd.userq import DRI
from contract.arrays import Bytes, Records

RENDER = f"{DRI}/renderD128"
GONE = (errno.ENOENT, "No such file or directory")


class FakeKernel(Kernel):
    """See ``kernel.Kernel``. ``calls`` counts requests by name."""

    simulated = True

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.calls: Counter[str] = Counter()
        self.open_files: dict[str, int] = {}
        self.machine = FakeComputer(self.behaviour)
        self._kfd = FakeKfd(self.machine)
        self._drm = FakeDrm(self.machine)

    @property
    def leaked(self) -> list[str]:
        """Objects that a program which has ended should have freed."""
        machine = self.machine
        stay = self.open_files.values()
        return [
            *(f"file {path}" for number, path in machine.files.items() if number not in stay),
            *(f"memory {handle}" for handle in machine.memory),
            *(f"queue {number}" for number in machine.gpu.queues),
            *(f"map {address:#x}" for address in machine.reserved),
            *self._kfd.leaked,
            *self._drm.leaked,
        ]

    def open(self, path: str) -> int:
        self._fail(path)
        if path not in (KFD, RENDER):
            raise FileNotFoundError(*GONE, path)
        number = self.machine.new_handle()
        self.machine.files[number] = path
        return number

    def close(self, file: int) -> None:
        if file not in self.machine.files:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.machine.files.pop(file) == RENDER:
            self._drm.closed(file)

    def ioctl(self, file: int, request: Request, argument: Records) -> None:
        path = self.machine.files.get(file)
        if path is None:
            raise OSError(errno.EBADF, f"{request.name}: not open")
        self.calls[request.name] += 1
        if argument.dtype != request.dtype or argument.nbytes != request.number >> 16 & 0x3FFF:
            raise OSError(errno.EINVAL, f"{request.name}: {argument.nbytes} bytes")
        self._fail(request.name)
        if path == KFD:
            self._kfd.answer(request, argument)
        else:
            self._drm.answer(file, request, argument)

    def reserve(self, nbytes: int) -> int:
        address = self.machine.space.reserve(nbytes)
        self.machine.reserved[address] = nbytes
        return address

    def map(self, address: int, nbytes: int, file: int, offset: int) -> int:
        if self.machine.files.get(file) == KFD:
            return self._kfd.map(address, nbytes, offset)
        return self._drm.map(address, nbytes, file, offset)

    def unmap(self, address: int, nbytes: int) -> None:
        if self.machine.reserved.pop(address, 0) != nbytes:
            raise OSError(errno.EINVAL, "munmap")
        if self.machine.doorbells.pop(address, None) is None:
            self.machine.space.release(address, nbytes)

    def view(self, address: int, nbytes: int) -> Bytes:
        if address in self.machine.doorbells:
            return self.machine.doorbells[address].view(np.uint8)[:nbytes]
        return self.machine.space.host(address, nbytes)

    def read_text(self, path: str) -> str:
        self._fail(NODES if path.startswith(NODES) else path)
        texts = {**self._kfd.texts(), **self._drm.texts()}
        texts[RELEASE] = f"{self.behaviour.release}\n"
        if path not in texts:
            raise FileNotFoundError(*GONE, path)
        return texts[path]

    def names(self, path: str) -> list[str]:
        self._fail(path if path == DRI else NODES)
        if path == DRI:
            return ["by-path", "card0", "renderD128"]
        return ["0"] if path.endswith("mem_banks") else ["0", "1"]

    def ring(self, doorbell: NDArray[np.uint64], value: int) -> None:
        doorbell[0] = value
        self.idle()

    def idle(self) -> None:
        """Continue all queues."""
        for queue in self.machine.gpu.queues.values():
            queue.work(self.behaviour.packets)

    def complaint(self) -> str:
        queues = self.machine.gpu.queues.values()
        return "; ".join(str(queue.fault) for queue in queues if queue.fault)

    def reset(self) -> None:
        """Simulate the fault of another program: the GPU restarts and queues are gone."""
        self.machine.was_reset = True
        for queue in self.machine.gpu.queues.values():
            queue.fault = GpuFault("reset")

    def _fail(self, what: str) -> None:
        if number := self.behaviour.errors.get(what):
            raise OSError(number, what)
