"""A simulated amdkfd: memory, queues and events, and the checks of the real one."""

import errno
from collections.abc import Callable, Mapping

import numpy as np

from accel.amd import uapi
from accel.amd.kernel import memory_at
from accel.amd.kfd import DOORBELL_BYTES, KFD
from accel.amd.sim.fake_machine import MAX_QUEUES, FakeComputer, FakeMemory
from accel.amd.topology import EOP_BYTES, NODES, PAGE, Gpu
from accel.amd.uapi import Memory, Request
from contract.arrays import Records

GPU_ID = 51_201
DOORBELL_OFFSET = 3 << 62 | GPU_ID << 46


class FakeKfd:
    """The answers of ``/dev/kfd``."""

    def __init__(self, machine: FakeComputer) -> None:
        self._machine = machine
        self._vm: int | None = None
        self._enabled = False
        self._events: dict[int, int] = {}
        self._doorbells = np.zeros(DOORBELL_BYTES // 8, np.uint64)
        self._answers: Mapping[str, Callable[[Records], None]] = {
            "GET_VERSION": self._version,
            "GET_PROCESS_APERTURES_NEW": self._apertures,
            "ACQUIRE_VM": self._acquire,
            "RUNTIME_ENABLE": self._enable,
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
    def leaked(self) -> list[str]:
        """Objects that were not freed."""
        return [f"event {number}" for number in self._events]

    def answer(self, request: Request, argument: Records) -> None:
        """Answer one request."""
        self._answers[request.name](argument)

    def map(self, address: int, nbytes: int, offset: int) -> int:
        """Map what the file has at ``offset``."""
        if address or offset != DOORBELL_OFFSET or nbytes != DOORBELL_BYTES:
            raise OSError(errno.EINVAL, "mmap of doorbells")
        pointer = int(self._doorbells.ctypes.data)
        self._machine.doorbells[pointer] = self._doorbells
        self._machine.reserved[pointer] = nbytes
        return pointer

    @property
    def _architecture(self) -> str:
        return Gpu("1", GPU_ID, "", self._machine.behaviour.properties, 0).architecture

    def texts(self) -> Mapping[str, str]:
        """The files below ``/sys``."""
        behaviour = self._machine.behaviour
        bank = {"heap_type": 1 if behaviour.public else 2, "size_in_bytes": behaviour.memory_bytes}
        return {
            f"{NODES}/0/gpu_id": "0\n",
            f"{NODES}/1/gpu_id": f"{GPU_ID}\n",
            f"{NODES}/1/name": f"{behaviour.name or self._architecture}\n",
            f"{NODES}/1/properties": _listed(behaviour.properties),
            f"{NODES}/1/mem_banks/0/properties": _listed(bank),
        }

    def _version(self, argument: Records) -> None:
        argument["major_version"], argument["minor_version"] = self._machine.behaviour.version

    def _apertures(self, argument: Records) -> None:
        argument["num_of_nodes"] = 1

    def _acquire(self, argument: Records) -> None:
        render = int(argument["drm_fd"][0])
        wrong = self._machine.files.get(render) in (None, KFD)
        if wrong or int(argument["gpu_id"][0]) != GPU_ID:
            raise OSError(errno.EINVAL, "ACQUIRE_VM")
        if self._vm not in (None, render):
            raise OSError(errno.EBUSY, "ACQUIRE_VM: this process has one, of another file")
        self._vm = render

    def _enable(self, argument: Records) -> None:
        if self._machine.behaviour.version < (1, 13):
            raise OSError(errno.EINVAL, "RUNTIME_ENABLE")
        if self._enabled:
            raise OSError(errno.EBUSY, "RUNTIME_ENABLE")
        self._enabled = True

    def _allocate(self, argument: Records) -> None:
        machine = self._machine
        address, nbytes = int(argument["va_addr"][0]), int(argument["size"][0])
        flags = Memory(int(argument["flags"][0]))
        own = bool(flags & Memory.VRAM)
        if self._vm is None or not nbytes or address % PAGE or nbytes % PAGE:
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU")
        if own == bool(flags & Memory.GTT):
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU")
        if flags & Memory.PUBLIC and not machine.behaviour.public:
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU: host-visible memory")
        if not machine.has_reserved(address, nbytes):
            raise OSError(errno.EINVAL, "ALLOC_MEMORY_OF_GPU: addresses in use")
        if own and nbytes > machine.free_bytes:
            raise OSError(errno.ENOMEM, "ALLOC_MEMORY_OF_GPU")
        handle = machine.new_handle()
        visible = not own or bool(flags & Memory.PUBLIC)
        machine.memory[handle] = FakeMemory(nbytes, own, visible, address)
        argument["handle"] = handle
        argument["mmap_offset"] = handle * PAGE

    def _held(self, argument: Records) -> FakeMemory:
        memory = self._machine.memory.get(int(argument["handle"][0]))
        if memory is None:
            raise OSError(errno.EINVAL, "unknown handle")
        return memory

    def _free(self, argument: Records) -> None:
        if self._held(argument).mapped:
            raise OSError(errno.EBUSY, "FREE_MEMORY_OF_GPU")
        del self._machine.memory[int(argument["handle"][0])]

    def _map(self, argument: Records) -> None:
        self._set_mapped(argument, True)

    def _unmap(self, argument: Records) -> None:
        self._set_mapped(argument, False)

    def _set_mapped(self, argument: Records, mapped: bool) -> None:
        memory = self._held(argument)
        devices = int(argument["n_devices"][0])
        ids = memory_at(int(argument["device_ids_array_ptr"][0]), 4 * devices).view(np.uint32)
        if ids.tolist() != [GPU_ID]:
            raise OSError(errno.EINVAL, "unknown GPU")
        memory.mapped = mapped
        self._machine.space.view.map(memory.address, memory.nbytes, mapped)
        argument["n_success"] = devices

    def _available(self, argument: Records) -> None:
        argument["available"] = self._machine.free_bytes

    def _create_queue(self, argument: Records) -> None:
        machine = self._machine
        gpu = Gpu("1", GPU_ID, "", machine.behaviour.properties, 0)
        value = {name: int(argument[name][0]) for name in uapi.CREATE_QUEUE.dtype.names or ()}
        ring, size = value["ring_base_address"], value["ring_size"]
        requested = {
            "a compute queue of this GPU": value["queue_type"] == uapi.QUEUE_COMPUTE
            and value["gpu_id"] == GPU_ID,
            "percent and priority": value["queue_percentage"] <= uapi.MAX_PERCENT
            and value["queue_priority"] <= 15,
            "a ring that is a power of two": size >= PAGE and not size & (size - 1),
            "the ring's own memory": machine.is_object(ring, size),
            "pointers in mapped pages": machine.is_mapped(value["write_pointer_address"], 8)
            and machine.is_mapped(value["read_pointer_address"], 8),
            "the end-of-pipe buffer": value["eop_buffer_size"] == EOP_BYTES
            and machine.is_object(value["eop_buffer_address"], EOP_BYTES),
            "the control stack": value["ctl_stack_size"] == gpu.control_stack_bytes,
            "the save area": value["ctx_save_restore_size"] >= gpu.save_bytes
            and machine.is_object(value["ctx_save_restore_address"], gpu.save_area_bytes),
        }
        for what, right in requested.items():
            if not right:
                raise OSError(errno.EINVAL, f"CREATE_QUEUE: {what}")
        if len(machine.gpu.queues) == MAX_QUEUES:
            raise OSError(errno.ENOMEM, "CREATE_QUEUE")
        index = next(n for n in range(MAX_QUEUES) if n + 1 not in machine.gpu.queues)
        queue = machine.new_queue(
            self._doorbells[index:],
            machine.space.host(ring, size),
            value["write_pointer_address"],
            value["read_pointer_address"],
        )
        argument["queue_id"] = queue.number
        argument["doorbell_offset"] = DOORBELL_OFFSET | index * 8

    def _destroy_queue(self, argument: Records) -> None:
        if self._machine.gpu.queues.pop(int(argument["queue_id"][0]), None) is None:
            raise OSError(errno.EINVAL, "DESTROY_QUEUE")

    def _create_event(self, argument: Records) -> None:
        number = self._machine.new_handle()
        self._events[number] = int(argument["event_type"][0])
        argument["event_id"] = number

    def _destroy_event(self, argument: Records) -> None:
        if self._events.pop(int(argument["event_id"][0]), None) is None:
            raise OSError(errno.EINVAL, "DESTROY_EVENT")

    def _wait_events(self, argument: Records) -> None:
        count = int(argument["num_events"][0])
        data = memory_at(int(argument["events_ptr"][0]), count * uapi.EVENT_DATA.itemsize)
        happened = uapi.EVENT_HW_EXCEPTION if self._machine.was_reset else uapi.EVENT_MEMORY
        argument["wait_result"] = uapi.WAIT_TIMEOUT
        for event in data.view(uapi.EVENT_DATA):
            kind = self._events.get(int(event["event_id"]))
            if kind is None:
                raise OSError(errno.EINVAL, "WAIT_EVENTS")
            if self._machine.faulted and kind == happened:
                event["not_present"] = int(kind == uapi.EVENT_MEMORY)
                event["gpu_va"] = self._machine.fault_address
                argument["wait_result"] = uapi.WAIT_COMPLETE


def _listed(properties: dict[str, int]) -> str:
    return "".join(f"{name} {value}\n" for name, value in properties.items())
