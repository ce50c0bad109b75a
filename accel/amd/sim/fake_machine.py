"""State that the simulated drivers of one machine share: its GPU, open files, memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.amd.generation import BY_ARCHITECTURE, GFX12
from accel.amd.sim.fake_gpu import AddressSpace, FakeGpu, FakeQueue
from accel.amd.topology import Gpu
from contract.arrays import Bytes

ADDRESS_SPACE = 16 << 30
MAX_QUEUES = 8
PROPERTIES = {
    "simd_count": 128,
    "simd_per_cu": 2,
    "num_xcc": 1,
    "gfx_target_version": 120001,
    "drm_render_minor": 128,
    "wave_front_size": 32,
    "lds_size_in_kb": 64,
}

FIRMWARE_VERSIONS = {"me": 2780, "pfp": 2840, "mec": 3050, "mes": 123}


@dataclass(slots=True)
class Behaviour:
    """The properties of the simulated machine.

    ``version`` is amdkfd's, ``drm_version`` that of the graphics driver, ``drm_driver`` its name.
    ``name`` is amdkfd's name of the GPU, by default its architecture. ``errors`` are error numbers
    by the path that is opened or the request that is made, ``memory_bytes`` the GPU's memory,
    ``public`` whether the host can access all of it. ``release`` is that of Linux, ``user_queue``
    the parameter of amdgpu, ``firmware`` versions. ``slots`` user queues are offered, for the
    engines in ``engines``. With ``checked`` queues check that launches see what they read;
    ``packets`` are how many a queue processes at a time, None for all."""

    version: tuple[int, int] = (1, 17)
    drm_version: tuple[int, int] = (3, 64)
    drm_driver: str = "amdgpu"
    discovery: int = 12 << 16 | 1
    name: str = ""
    properties: dict[str, int] = field(default_factory=lambda: dict(PROPERTIES))
    memory_bytes: int = 4 << 30
    public: bool = True
    release: str = "6.17.0-simulated"
    user_queue: str = "1"
    firmware: dict[str, int] = field(default_factory=lambda: dict(FIRMWARE_VERSIONS))
    slots: int = MAX_QUEUES
    engines: int = 0b10
    checked: bool = False
    packets: int | None = None
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class FakeMemory:
    """A memory object of a driver: in the GPU's own memory if ``on_device``, else in the host's.
    ``address`` is 0 until the driver knows it; the GPU can access the object once ``mapped``."""

    nbytes: int
    on_device: bool
    host_visible: bool
    address: int = 0
    mapped: bool = False


@dataclass(slots=True)
class FakeComputer:
    """A machine with one GPU.

    ``files`` are the names of open files by number, ``reserved`` the sizes in bytes of a program's
    ranges of addresses, ``doorbells`` the pages of doorbells by address, and ``memory`` the objects
    by handle."""

    behaviour: Behaviour
    space: AddressSpace = field(default_factory=lambda: AddressSpace(ADDRESS_SPACE))
    files: dict[int, str] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    doorbells: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    memory: dict[int, FakeMemory] = field(default_factory=dict)
    was_reset: bool = False
    gpu: FakeGpu = field(init=False)
    _last_handle: int = 3

    def __post_init__(self) -> None:
        named = Gpu("1", 0, "", self.behaviour.properties, 0).architecture
        # A GPU without kernels can be found, but runs nothing.
        generation = BY_ARCHITECTURE.get(named, GFX12)
        self.gpu = FakeGpu(self.space, self.behaviour.checked, generation)

    def new_handle(self) -> int:
        """The handle of a new object, never returned before."""
        self._last_handle += 1
        return self._last_handle

    @property
    def free_bytes(self) -> int:
        """Free bytes of the GPU's own memory."""
        used = sum(m.nbytes for m in self.memory.values() if m.on_device)
        return self.behaviour.memory_bytes - used

    @property
    def faulted(self) -> bool:
        """Whether a queue met a fault."""
        return any(queue.fault is not None for queue in self.gpu.queues.values())

    @property
    def fault_address(self) -> int:
        """The address of the fault, 0 if it has none."""
        faults = [queue.fault for queue in self.gpu.queues.values() if queue.fault is not None]
        return faults[0].address if faults else 0

    def has_reserved(self, address: int, nbytes: int) -> bool:
        """Whether a program has reserved these addresses."""
        return any(a <= address and address + nbytes <= a + n for a, n in self.reserved.items())

    def mapped_at(self, address: int, nbytes: int) -> Iterator[FakeMemory]:
        """The objects that contain a whole range and that the GPU can access."""
        for memory in self.memory.values():
            end = memory.address + memory.nbytes
            if memory.mapped and memory.address <= address and address + nbytes <= end:
                yield memory

    def is_mapped(self, address: int, nbytes: int) -> bool:
        """Whether the range is part of one object that the GPU can access."""
        return any(self.mapped_at(address, nbytes))

    def is_object(self, address: int, nbytes: int) -> bool:
        """Whether the range is exactly one object that the GPU can access."""
        return any(m.nbytes == nbytes for m in self.mapped_at(address, nbytes))

    def new_queue(
        self, doorbell: NDArray[np.uint64], ring: Bytes, write: int, read: int
    ) -> FakeQueue:
        """The GPU's next queue, with its doorbell at 0."""
        doorbell[0] = 0
        number = next(n for n in range(1, MAX_QUEUES + 1) if n not in self.gpu.queues)
        return self.gpu.add(number, doorbell, ring, write, read)
