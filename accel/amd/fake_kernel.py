"""A simulated amdkfd: it keeps to what the real one enforces, and runs queues in this process.

It reads the structures of ``uapi.py`` from the bytes it is given. A launch is done when the
doorbell has been rung, unless its queue waits for memory: then ``idle`` looks again.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.amd import uapi
from accel.amd.fake_gpu import AddressSpace, FakeGpu, FakeQueue
from accel.amd.kernel import Bytes, memory_at
from accel.amd.memory_view import PAGE
from accel.amd.topology import EOP_BYTES, NODES, Gpu
from accel.amd.uapi import Memory, Request

Argument = NDArray[np.void]

KFD, RENDER = "/dev/kfd", "/dev/dri/renderD128"
GPU_ID = 51_201
DOORBELLS = 8192
DOORBELL_OFFSET = 3 << 62 | GPU_ID << 46
ADDRESS_SPACE = 16 << 30
MOST_QUEUES = 8
PROPERTIES = {
    "simd_count": 128,
    "simd_per_cu": 2,
    "num_xcc": 1,
    "gfx_target_version": 120001,
    "drm_render_minor": 128,
    "wave_front_size": 32,
    "lds_size_in_kb": 64,
}


@dataclass(slots=True)
class Behaviour:
    """What the simulated machine is like. ``errors`` are numbers of errors by the path that is
    opened or the request that is made, ``memory_bytes`` what the GPU has, ``checked`` whether its
    queues check that launches see what they read."""

    version: tuple[int, int] = (1, 17)
    properties: dict[str, int] = field(default_factory=lambda: dict(PROPERTIES))
    memory_bytes: int = 4 << 30
    public: bool = True
    checked: bool = False
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Memory:
    address: int
    nbytes: int
    flags: Memory
    mapped: bool = False


class FakeKernel:
    """See ``kernel.Kernel``. ``calls`` counts requests by name."""

    simulated = True

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.calls: Counter[str] = Counter()
        self.space = AddressSpace(ADDRESS_SPACE)
        self.gpu = FakeGpu(self.space, self.behaviour.checked)
        self.files: dict[int, str] = {}
        self.memory: dict[int, _Memory] = {}
        self._vm: int | None = None
        self._events: dict[int, int] = {}
        self._next = 3
        self._doorbells = np.zeros(DOORBELLS // 8, np.uint64)
        self._mapped: dict[int, int] = {}
        self._answers: dict[str, Callable[[int, Argument], None]] = {
            "GET_VERSION": self._version,
            "GET_PROCESS_APERTURES_NEW": self._apertures,
            "ACQUIRE_VM": self._acquire,
            "RUNTIME_ENABLE": self._nothing,
            "ALLOC_MEMORY_OF_GPU": self._allocate,
            "FREE_MEMORY_OF_GPU": self._free,
            "MAP_MEMORY_TO_GPU": self._map,
            "UNMAP_MEMORY_FROM_GPU": self._unmap,
            "AVAILABLE_MEMORY": self._available,
            "CREATE_QUEUE": self._create_queue,
            "DESTROY_QUEUE": self._destroy_queue,
            "CREATE_EVENT": self._create_event,
            "DESTROY_EVENT": self._destroy_event,
            "WAIT_EVENTS": self._wait_events,
        }

    @property
    def left_over(self) -> list[str]:
        """What a program that has ended should have given back."""
        return [
            *(f"file {path}" for path in self.files.values()),
            *(f"memory {handle}" for handle in self.memory),
            *(f"queue {number}" for number in self.gpu.queues),
            *(f"event {number}" for number in self._events),
            *(f"map {address:#x}" for address in self._mapped),
        ]

    def open(self, path: str) -> int:
        """See ``Kernel``."""
        self._fail(path)
        if path not in (KFD, RENDER):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        self._next += 1
        self.files[self._next] = path
        return self._next

    def close(self, file: int) -> None:
        """See ``Kernel``."""
        if file not in self.files:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.files.pop(file) == KFD:
            self.gpu.queues.clear()

    def ioctl(self, file: int, request: Request, argument: Argument) -> None:
        """See ``Kernel``."""
        if self.files.get(file) != KFD:
            raise OSError(errno.EBADF, f"{request.name}: not open")
        self.calls[request.name] += 1
        if argument.dtype != request.dtype or argument.nbytes != request.number >> 16 & 0x3FFF:
            raise OSError(errno.EINVAL, f"{request.name}: {argument.nbytes} bytes")
        self._fail(request.name)
        if request.name == "RUNTIME_ENABLE" and self.behaviour.version < (1, 13):
            raise OSError(errno.EINVAL, request.name)
        self._answers[request.name](file, argument)

    def reserve(self, nbytes: int) -> int:
        """See ``Kernel``."""
        address = self.space.reserve(nbytes)
        self._mapped[address] = nbytes
        return address

    def map(self, address: int, nbytes: int, file: int, offset: int) -> int:
        """See ``Kernel``."""
        path = self.files.get(file)
        if path == KFD and not address:
            if offset != DOORBELL_OFFSET or nbytes != DOORBELLS:
                raise OSError(errno.EINVAL, "mmap of doorbells")
            place = int(self._doorbells.ctypes.data)
            self._mapped[place] = nbytes
            return place
        memory = self.memory.get(offset // PAGE)
        if path != RENDER or memory is None or (memory.address, memory.nbytes) != (address, nbytes):
            raise OSError(errno.EINVAL, "mmap of memory")
        if memory.flags & Memory.VRAM and not memory.flags & Memory.PUBLIC:
            raise OSError(errno.EPERM, "mmap of memory that the host does not see")
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """See ``Kernel``."""
        if self._mapped.pop(address, 0) != nbytes:
            raise OSError(errno.EINVAL, "munmap")
        if address != int(self._doorbells.ctypes.data):
            self.space.release(address, nbytes)

    def view(self, address: int, nbytes: int) -> Bytes:
        """See ``Kernel``."""
        if address == int(self._doorbells.ctypes.data):
            return self._doorbells.view(np.uint8)[:nbytes]
        return self.space.host(address, nbytes)

    def read_text(self, path: str) -> str:
        """See ``Kernel``."""
        self._fail(NODES)
        texts = {
            f"{NODES}/0/gpu_id": "0\n",
            f"{NODES}/1/gpu_id": f"{GPU_ID}\n",
            f"{NODES}/1/name": "gfx1201\n",
            f"{NODES}/1/properties": _listed(self.behaviour.properties),
            f"{NODES}/1/mem_banks/0/properties": _listed(
                {
                    "heap_type": 1 if self.behaviour.public else 2,
                    "size_in_bytes": self.behaviour.memory_bytes,
                }
            ),
        }
        if path not in texts:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return texts[path]

    def names(self, path: str) -> list[str]:
        """See ``Kernel``."""
        self._fail(NODES)
        return ["0"] if path.endswith("mem_banks") else ["0", "1"]

    def ring(self, doorbell: NDArray[np.uint64], value: int) -> None:
        """See ``Kernel``."""
        doorbell[0] = value
        self.idle()

    def idle(self) -> None:
        """Queues go on."""
        for queue in self.gpu.queues.values():
            queue.work(int(self._doorbells[queue.number]))

    def complaint(self) -> str:
        """See ``Kernel``."""
        return "; ".join(str(queue.fault) for queue in self.gpu.queues.values() if queue.fault)

    def _fail(self, what: str) -> None:
        if number := self.behaviour.errors.get(what):
            raise OSError(number, what)

    def _nothing(self, file: int, argument: Argument) -> None:
        pass

    def _version(self, file: int, argument: Argument) -> None:
        argument["major_version"], argument["minor_version"] = self.behaviour.version

    def _apertures(self, file: int, argument: Argument) -> None:
        argument["num_of_nodes"] = 1

    def _acquire(self, file: int, argument: Argument) -> None:
        render = int(argument["drm_fd"][0])
        if self.files.get(render) != RENDER or int(argument["gpu_id"][0]) != GPU_ID:
            raise OSError(errno.EINVAL, "ACQUIRE_VM")
        if self._vm not in (None, render) and self._vm in self.files:
            raise OSError(errno.EBUSY, "ACQUIRE_VM")
        self._vm = render

    def _allocate(self, file: int, argument: Argument) -> None:
        address, nbytes = int(argument["va_addr"][0]), int(argument["size"][0])
        flags = Memory(int(argument["flags"][0]))
        if self._vm is None or not nbytes or address % PAGE or nbytes % PAGE:
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU")
        if bool(flags & Memory.VRAM) == bool(flags & Memory.GTT):
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU")
        if flags & Memory.PUBLIC and not self.behaviour.public:
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU: host-visible memory")
        if not any(a <= address and address + nbytes <= a + n for a, n in self._mapped.items()):
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU: addresses in use")
        if flags & Memory.VRAM and nbytes > self._left():
            raise OSError(errno.ENOMEM, "ALLOC_MEMORY_OF_GPU")
        self._next += 1
        self.memory[self._next] = _Memory(address, nbytes, flags)
        argument["handle"] = self._next
        argument["mmap_offset"] = self._next * PAGE

    def _left(self) -> int:
        held = sum(m.nbytes for m in self.memory.values() if m.flags & Memory.VRAM)
        return self.behaviour.memory_bytes - held

    def _held(self, argument: Argument) -> _Memory:
        memory = self.memory.get(int(argument["handle"][0]))
        if memory is None:
            raise OSError(errno.EINVAL, "unknown handle")
        return memory

    def _free(self, file: int, argument: Argument) -> None:
        memory = self._held(argument)
        if memory.mapped:
            raise OSError(errno.EBUSY, "FREE_MEMORY_OF_GPU")
        del self.memory[int(argument["handle"][0])]

    def _map(self, file: int, argument: Argument) -> None:
        self._set_mapped(argument, True)

    def _unmap(self, file: int, argument: Argument) -> None:
        self._set_mapped(argument, False)

    def _set_mapped(self, argument: Argument, mapped: bool) -> None:
        memory = self._held(argument)
        devices = int(argument["n_devices"][0])
        ids = memory_at(int(argument["device_ids_array_ptr"][0]), 4 * devices).view(np.uint32)
        if ids.tolist() != [GPU_ID]:
            raise OSError(errno.EINVAL, "unknown GPU")
        memory.mapped = mapped
        self.space.view.map(memory.address, memory.nbytes, mapped)
        argument["n_success"] = devices

    def _available(self, file: int, argument: Argument) -> None:
        argument["available"] = self._left()

    def _create_queue(self, file: int, argument: Argument) -> None:
        gpu = Gpu("1", GPU_ID, "", self.behaviour.properties, 0)
        value = {name: int(argument[name][0]) for name in uapi.CREATE_QUEUE.dtype.names or ()}
        ring, size = value["ring_base_address"], value["ring_size"]
        wanted = {
            "a compute queue of this GPU": value["queue_type"] == uapi.QUEUE_COMPUTE
            and value["gpu_id"] == GPU_ID,
            "percent and priority": value["queue_percentage"] <= uapi.MOST_PERCENT
            and value["queue_priority"] <= 15,
            "a ring that is a power of two": size >= PAGE and not size & (size - 1),
            "the ring's own memory": self._whole(ring, size),
            "pointers in mapped pages": self._inside(value["write_pointer_address"], 8)
            and self._inside(value["read_pointer_address"], 8),
            "the end-of-pipe buffer": value["eop_buffer_size"] == EOP_BYTES
            and self._whole(value["eop_buffer_address"], EOP_BYTES),
            "the control stack": value["ctl_stack_size"] == gpu.control_stack_bytes,
            "the save area": value["ctx_save_restore_size"] >= gpu.save_bytes
            and self._whole(value["ctx_save_restore_address"], gpu.save_area_bytes),
        }
        for what, right in wanted.items():
            if not right:
                raise OSError(errno.EINVAL, f"CREATE_QUEUE: {what}")
        if len(self.gpu.queues) == MOST_QUEUES:
            raise OSError(errno.ENOMEM, "CREATE_QUEUE")
        number = next(n for n in range(MOST_QUEUES) if n not in self.gpu.queues)
        self._doorbells[number] = 0
        self.gpu.queues[number] = FakeQueue(
            number,
            self.space.host(ring, size).view(np.uint32),
            self.space.host(value["write_pointer_address"], 8).view(np.uint64),
            self.space.host(value["read_pointer_address"], 4).view(np.uint32),
            self.gpu.processor(has_eop_buffer=True),
        )
        argument["queue_id"] = number
        argument["doorbell_offset"] = DOORBELL_OFFSET | number * 8

    def _whole(self, address: int, nbytes: int) -> bool:
        """Whether that is one allocation exactly, mapped."""
        return any(
            (m.address, m.nbytes) == (address, nbytes) and m.mapped for m in self.memory.values()
        )

    def _inside(self, address: int, nbytes: int) -> bool:
        return any(
            m.mapped and m.address <= address and address + nbytes <= m.address + m.nbytes
            for m in self.memory.values()
        )

    def _destroy_queue(self, file: int, argument: Argument) -> None:
        if self.gpu.queues.pop(int(argument["queue_id"][0]), None) is None:
            raise OSError(errno.EINVAL, "DESTROY_QUEUE")

    def _create_event(self, file: int, argument: Argument) -> None:
        self._next += 1
        self._events[self._next] = int(argument["event_type"][0])
        argument["event_id"] = self._next

    def _destroy_event(self, file: int, argument: Argument) -> None:
        if self._events.pop(int(argument["event_id"][0]), None) is None:
            raise OSError(errno.EINVAL, "DESTROY_EVENT")

    def _wait_events(self, file: int, argument: Argument) -> None:
        count = int(argument["num_events"][0])
        data = memory_at(int(argument["events_ptr"][0]), count * uapi.EVENT_DATA.itemsize)
        faulted = any(queue.fault is not None for queue in self.gpu.queues.values())
        argument["wait_result"] = uapi.WAIT_TIMEOUT
        for event in data.view(uapi.EVENT_DATA):
            kind = self._events.get(int(event["event_id"]))
            if kind is None:
                raise OSError(errno.EINVAL, "WAIT_EVENTS")
            if faulted and kind == uapi.EVENT_MEMORY:
                event["not_present"] = 1
                argument["wait_result"] = uapi.WAIT_COMPLETE


def _listed(properties: dict[str, int]) -> str:
    return "".join(f"{name} {value}\n" for name, value in properties.items())
