"""Simulates the amdgpu driver of a render node (``/dev/dri/renderD*``): its memory objects, user
queues and syncobjs.

It refuses what the real driver refuses (``amdgpu_gem.c``, ``amdgpu_userq.c``,
``mes_userqueue.c``)."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.amd import uapi_drm as drm
from accel.amd.kernel import memory_at
from accel.amd.pm4 import IB_INHERIT_COMPUTE, IB_VALID
from accel.amd.sim.fake_gpu import BASE, FakeQueue
from accel.amd.sim.fake_machine import ADDRESS_SPACE, FakeComputer, FakeMemory
from accel.amd.system import FIRMWARE, USER_QUEUES
from accel.amd.topology import PAGE
from accel.amd.uapi import Request
from accel.amd.uapi_drm import Create, Domain, Page, Query
from contract.arrays import Records

ANY_PAGE = Page.READABLE | Page.WRITEABLE | Page.EXECUTABLE
PRIORITIES, HIGH = 3, 3
EOP_BYTES = 2048


@dataclass(slots=True)
class _Object:
    """A memory object of GEM_CREATE, owned by an open ``file``.

    ``doorbells`` is set for a page of doorbells. ``host`` is the address where the host has mapped
    the object, 0 for none."""

    file: int
    memory: FakeMemory
    doorbells: NDArray[np.uint64] | None = None
    host: int = 0


@dataclass(slots=True)
class _Syncobj:
    """A synchronization object, for a timeline or for a queue.

    ``point`` is the last point reached of the timeline. Otherwise the object is signalled once
    ``queue`` has processed its ring up to word ``value``."""

    point: int = 0
    queue: FakeQueue | None = None
    value: int = 0


class FakeDrm:
    """Answers the ioctl requests of open render nodes."""

    def __init__(self, machine: FakeComputer) -> None:
        self._machine = machine
        self._objects: dict[int, _Object] = {}
        self._syncobjs: dict[int, _Syncobj] = {}
        self._contexts: set[int] = set()
        self._queues: dict[int, int] = {}
        # Memory that is not mapped before somebody waits for a point of a timeline.
        self._pending: list[tuple[int, int, FakeMemory]] = []
        self._answers: Mapping[str, Callable[[int, Records], None]] = {
            "VERSION": self._version,
            "INFO": self._info,
            "GEM_CREATE": self._create,
            "GEM_MMAP": self._mmap_offset,
            "GEM_CLOSE": self._close,
            "GEM_VA": self._map_address,
            "CTX": self._context,
            "USERQ": self._userq,
            "USERQ_SIGNAL": self._signal,
            "SYNCOBJ_CREATE": self._create_syncobj,
            "SYNCOBJ_DESTROY": self._destroy_syncobj,
            "SYNCOBJ_WAIT": self._wait_syncobjs,
            "SYNCOBJ_TIMELINE_WAIT": self._wait_timeline,
        }

    @property
    def leaked(self) -> list[str]:
        """Objects that nobody freed. Queues are not among them: closing their file frees them."""
        return [
            *(f"object {handle}" for handle in self._objects),
            *(f"syncobj {handle}" for handle in self._syncobjs),
            *(f"context {number}" for number in self._contexts),
        ]

    def texts(self) -> Mapping[str, str]:
        """The driver's files below ``/sys`` and their text."""
        behaviour = self._machine.behaviour
        versions = behaviour.firmware.items()
        return {USER_QUEUES: f"{behaviour.user_queue}\n"} | {
            f"{FIRMWARE}/{name}_fw_version": f"{version:#010x}\n" for name, version in versions
        }

    def answer(self, file: int, request: Request, argument: Records) -> None:
        """Execute an ioctl ``request`` of open ``file``, and write its results to ``argument``.
        Raises OSError with the driver's error number."""
        self._answers[request.name](file, argument)

    def map(self, address: int, nbytes: int, file: int, offset: int) -> int:
        """Map the object at ``offset`` of the file, of either driver, into the host's memory and
        return its address. An ``address`` of 0 lets the driver choose, which only doorbells do."""
        handle = offset // PAGE
        mapped = self._objects.get(handle)
        if mapped is not None and mapped.doorbells is not None and not address:
            page = int(mapped.doorbells.ctypes.data)
            self._machine.doorbells[page] = mapped.doorbells
            self._machine.reserved[page] = nbytes
            return page
        memory = self._machine.memory.get(handle)
        if memory is None or memory.nbytes != nbytes or memory.address not in (0, address):
            raise OSError(errno.EINVAL, "mmap of memory")
        if not memory.host_visible:
            raise OSError(errno.EPERM, "mmap of memory that the host does not see")
        if mapped is not None:
            mapped.host = address
        return address

    def closed(self, file: int) -> None:
        """Free everything that belongs to a closed file."""
        for number in [n for n, owner in self._queues.items() if owner == file]:
            self._machine.gpu.queues.pop(number)
            del self._queues[number]

    def _version(self, file: int, argument: Records) -> None:
        behaviour = self._machine.behaviour
        argument["version_major"], argument["version_minor"] = behaviour.drm_version
        name = behaviour.drm_driver.encode()
        room = min(int(argument["name_len"][0]), len(name))
        memory_at(int(argument["name"][0]), room)[:] = np.frombuffer(name[:room], np.uint8)
        argument["name_len"] = len(name)

    def _info(self, file: int, argument: Records) -> None:
        behaviour = self._machine.behaviour
        query = Query(int(argument["query"][0]))
        of_engine = {Query.HW_IP_INFO, Query.UQ_FW_AREAS}
        if query in of_engine and int(argument["type"][0]) != drm.IP_COMPUTE:
            raise OSError(errno.EINVAL, f"INFO {query.name}")
        self._fail(f"INFO {query.name}")
        visible = behaviour.memory_bytes if behaviour.public else 256 << 20
        fault = int(self._machine.faulted and not self._machine.was_reset)
        values: dict[Query, tuple[np.dtype[np.void], tuple[int, ...]]] = {
            Query.HW_IP_INFO: (drm.HW_IP, (behaviour.discovery, behaviour.slots)),
            Query.DEV_INFO: (drm.DEVICE, (BASE, BASE + ADDRESS_SPACE, behaviour.engines)),
            Query.MEMORY: (drm.MEMORY, (behaviour.memory_bytes, visible)),
            Query.GPUVM_FAULT: (drm.FAULT, (self._machine.fault_address, fault, 0)),
            Query.UQ_FW_AREAS: (drm.AREAS, (EOP_BYTES, 256)),
        }
        layout, fields = values[query]
        answer = np.zeros(1, layout)
        answer[0] = fields
        room = min(int(argument["return_size"][0]), answer.nbytes)
        memory_at(int(argument["return_pointer"][0]), room)[:] = answer.view(np.uint8)[:room]

    def _fail(self, what: str) -> None:
        if number := self._machine.behaviour.errors.get(what):
            raise OSError(number, what)

    def _create(self, file: int, argument: Records) -> None:
        nbytes = int(argument["bo_size"][0])
        domain = int(argument["domains"][0])
        if not nbytes or domain not in (Domain.GTT, Domain.VRAM, Domain.DOORBELL):
            raise OSError(errno.EINVAL, "GEM_CREATE")
        size = -(-nbytes // PAGE) * PAGE
        on_device = domain == Domain.VRAM
        if on_device and size > self._machine.free_bytes:
            raise OSError(errno.ENOMEM, "GEM_CREATE")
        flags = int(argument["domain_flags"][0])
        host_visible = not on_device or bool(flags & Create.CPU_ACCESS_REQUIRED)
        memory = FakeMemory(size, on_device, host_visible)
        handle = self._machine.new_handle()
        self._objects[handle] = _Object(file, memory)
        if domain == Domain.DOORBELL:
            self._objects[handle].doorbells = np.zeros(size // 8, np.uint64)
        else:
            self._machine.memory[handle] = memory
        argument.view(np.uint32)[0] = handle

    def _object_of(self, file: int, argument: Records) -> _Object:
        named = self._objects.get(int(argument["handle"][0]))
        if named is None or named.file != file:
            raise OSError(errno.ENOENT, "no such object")
        return named

    def _mmap_offset(self, file: int, argument: Records) -> None:
        handle = int(argument["handle"][0])
        self._object_of(file, argument)
        argument.view(np.uint64)[0] = handle * PAGE

    def _close(self, file: int, argument: Records) -> None:
        memory = self._object_of(file, argument).memory
        self._pending = [change for change in self._pending if change[2] is not memory]
        if memory.mapped:
            self._machine.space.view.map(memory.address, memory.nbytes, False)
        handle = int(argument["handle"][0])
        del self._objects[handle]
        self._machine.memory.pop(handle, None)

    def _map_address(self, file: int, argument: Records) -> None:
        target = self._object_of(file, argument)
        memory = target.memory
        address, nbytes = int(argument["va_address"][0]), int(argument["map_size"][0])
        inside = address >= BASE and address + nbytes <= BASE + ADDRESS_SPACE
        if address % PAGE or nbytes % PAGE or not inside or nbytes > memory.nbytes:
            raise OSError(errno.EINVAL, "GEM_VA: alignment or range")
        if int(argument["flags"][0]) & ~int(ANY_PAGE) or target.doorbells is not None:
            raise OSError(errno.EINVAL, "GEM_VA: flags")
        if int(argument["operation"][0]) != drm.VA_MAP:
            raise OSError(errno.EINVAL, "GEM_VA: operation")
        # The simulation requires equal addresses for host and GPU, which no real driver does.
        if address != target.host or any(self._machine.mapped_at(address, nbytes)):
            raise OSError(errno.EINVAL, "GEM_VA: addresses in use")
        timeline, point = (
            int(argument[name][0]) for name in ("vm_timeline_syncobj_out", "vm_timeline_point")
        )
        if timeline not in self._syncobjs:
            raise OSError(errno.ENOENT, "GEM_VA: no such syncobj")
        memory.address = address
        self._pending.append((timeline, point, memory))

    def _wait_timeline(self, file: int, argument: Records) -> None:
        """Apply the changes of page tables up to a timeline's point: the simulation delays them
        until somebody waits for them."""
        handle = int(memory_at(int(argument["handles"][0]), 4).view(np.uint32)[0])
        point = int(memory_at(int(argument["points"][0]), 8).view(np.uint64)[0])
        if handle not in self._syncobjs or int(argument["count_handles"][0]) != 1:
            raise OSError(errno.ENOENT, "SYNCOBJ_TIMELINE_WAIT")
        for change in [c for c in self._pending if c[0] == handle and c[1] <= point]:
            _, reached, memory = change
            memory.mapped = True
            self._machine.space.view.map(memory.address, memory.nbytes, True)
            self._syncobjs[handle].point = reached
            self._pending.remove(change)
        if self._syncobjs[handle].point < point:
            raise OSError(errno.ETIME, "SYNCOBJ_TIMELINE_WAIT")

    def _context(self, file: int, argument: Records) -> None:
        operation, number = int(argument["op"][0]), int(argument["ctx_id"][0])
        if operation == drm.CTX_ALLOC:
            number = self._machine.new_handle()
            self._contexts.add(number)
            argument.view(np.uint32)[0] = number
        elif number not in self._contexts:
            raise OSError(errno.EINVAL, "CTX")
        elif operation == drm.CTX_FREE:
            self._contexts.remove(number)
        elif operation == drm.CTX_QUERY_STATE2:
            argument.view(np.uint64)[0] = drm.CTX_RESET if self._machine.was_reset else 0
        else:
            raise OSError(errno.EINVAL, "CTX")

    def _userq(self, file: int, argument: Records) -> None:
        behaviour = self._machine.behaviour
        if not behaviour.engines >> drm.IP_COMPUTE & 1:
            raise OSError(drm.NOT_SUPPORTED, "USERQ")
        value = {name: int(argument[name][0]) for name in drm.USERQ.dtype.names or ()}
        operation = value.pop("op")
        if operation == drm.USERQ_FREE:
            number = value.pop("queue_id")
            if any(value.values()):
                raise OSError(errno.EINVAL, "USERQ FREE: other fields")
            if self._queues.pop(number, None) != file:
                raise OSError(errno.ENOENT, "USERQ FREE")
            del self._machine.gpu.queues[number]
            return
        if operation != drm.USERQ_CREATE:
            raise OSError(errno.EINVAL, "USERQ")
        doorbell = self._checked_doorbell(file, value)
        if len(self._machine.gpu.queues) >= behaviour.slots:
            raise OSError(errno.EINVAL if not behaviour.slots else errno.ENOMEM, "USERQ CREATE")
        queue = self._machine.new_queue(
            doorbell,
            self._machine.space.host(value["queue_va"], value["queue_size"]),
            value["wptr_va"],
            value["rptr_va"],
        )
        queue.processor.buffer_flags = IB_VALID | IB_INHERIT_COMPUTE
        queue.processor.signal = queue.signal
        self._queues[queue.number] = file
        argument.view(np.uint32)[0] = queue.number

    def _checked_doorbell(self, file: int, value: dict[str, int]) -> NDArray[np.uint64]:
        """The doorbell of a new queue with parameters ``value``. Raises OSError if one is wrong."""
        machine = self._machine
        size = value["queue_size"]
        page = self._objects.get(value["doorbell_handle"])
        if value["flags"] & PRIORITIES == HIGH:
            raise OSError(errno.EACCES, "USERQ CREATE: priority")
        descriptor = value["mqd"] if value["mqd_size"] == drm.MQD_BYTES else 0
        eop = int(memory_at(descriptor, 8).view(np.uint64)[0]) if descriptor else 0
        doorbells = page.doorbells if page is not None and page.file == file else None
        index = value["doorbell_offset"]
        requirements = {
            "a compute queue": value["ip_type"] == drm.IP_COMPUTE and not value["flags"],
            "a ring that is a power of two": size >= PAGE and not size & (size - 1),
            "a ring in mapped memory": machine.is_mapped(value["queue_va"], size),
            "a read pointer in a mapped page": machine.is_mapped(value["rptr_va"], PAGE),
            "a write pointer alone in its page": machine.is_object(value["wptr_va"], PAGE),
            "a doorbell": doorbells is not None and index < len(doorbells),
            "a descriptor": descriptor != 0,
            "the end-of-pipe buffer": machine.is_mapped(eop, PAGE),
        }
        for requirement, met in requirements.items():
            if not met:
                raise OSError(errno.EINVAL, f"USERQ CREATE: {requirement}")
        assert doorbells is not None
        if any(np.shares_memory(q.doorbell[:1], doorbells) for q in machine.gpu.queues.values()):
            raise OSError(errno.EBUSY, "USERQ CREATE: doorbell in use")
        return doorbells[index:]

    def _signal(self, file: int, argument: Records) -> None:
        queue = self._machine.gpu.queues.get(int(argument["queue_id"][0]))
        count = int(argument["num_syncobj_handles"][0])
        handles = memory_at(int(argument["syncobj_handles"][0]), 4 * count).view(np.uint32)
        if queue is None or not {*handles.tolist()} <= self._syncobjs.keys():
            raise OSError(errno.ENOENT, "USERQ_SIGNAL")
        for handle in handles.tolist():
            self._syncobjs[handle].queue = queue
            self._syncobjs[handle].value = int(queue.write_pointer[0])

    def _create_syncobj(self, file: int, argument: Records) -> None:
        handle = self._machine.new_handle()
        self._syncobjs[handle] = _Syncobj()
        argument["handle"] = handle

    def _destroy_syncobj(self, file: int, argument: Records) -> None:
        if self._syncobjs.pop(int(argument["handle"][0]), None) is None:
            raise OSError(errno.EINVAL, "SYNCOBJ_DESTROY")

    def _wait_syncobjs(self, file: int, argument: Records) -> None:
        count = int(argument["count_handles"][0])
        handles = memory_at(int(argument["handles"][0]), 4 * count).view(np.uint32)
        for handle in handles.tolist():
            syncobj = self._syncobjs.get(handle)
            if syncobj is None:
                raise OSError(errno.ENOENT, "SYNCOBJ_WAIT")
            if syncobj.queue is None:
                raise OSError(errno.EINVAL, "SYNCOBJ_WAIT: no fence")
            if syncobj.queue.signalled < syncobj.value:
                raise OSError(errno.ETIME, "SYNCOBJ_WAIT")
