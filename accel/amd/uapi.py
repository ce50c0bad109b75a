"""The interface of Linux's amdkfd driver: requests, structures, constants.

From ``include/uapi/linux/kfd_ioctl.h``, interface 1.17. Numbers are literals, and a test compares
them with the system's headers.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Request:
    """One ioctl: its number and the structure of its argument."""

    def __init__(self, name: str, number: int, nbytes: int, /, **fields: tuple[str, int]) -> None:
        self.name = name
        self.number = number
        names = list(fields)
        formats, offsets = zip(*fields.values(), strict=True)
        layout: Any = {"names": names, "formats": formats, "offsets": offsets}
        self.dtype = np.dtype(layout | {"itemsize": nbytes})

    def argument(self, **values: int) -> NDArray[np.void]:
        """A structure of zeros except for ``values``, as an array of one."""
        structure = np.zeros(1, self.dtype)
        for name, value in values.items():
            structure[name] = value
        return structure


U32, U64 = "<u4", "<u8"
GET_VERSION = Request("GET_VERSION", 0x80084B01, 8, major_version=(U32, 0), minor_version=(U32, 4))
CREATE_QUEUE = Request(
    "CREATE_QUEUE",
    0xC0604B02,
    96,
    ring_base_address=(U64, 0),
    write_pointer_address=(U64, 8),
    read_pointer_address=(U64, 16),
    doorbell_offset=(U64, 24),
    ring_size=(U32, 32),
    gpu_id=(U32, 36),
    queue_type=(U32, 40),
    queue_percentage=(U32, 44),
    queue_priority=(U32, 48),
    queue_id=(U32, 52),
    eop_buffer_address=(U64, 56),
    eop_buffer_size=(U64, 64),
    ctx_save_restore_address=(U64, 72),
    ctx_save_restore_size=(U32, 80),
    ctl_stack_size=(U32, 84),
)
DESTROY_QUEUE = Request("DESTROY_QUEUE", 0xC0084B03, 8, queue_id=(U32, 0))
CREATE_EVENT = Request(
    "CREATE_EVENT",
    0xC0204B08,
    32,
    event_page_offset=(U64, 0),
    event_trigger_data=(U32, 8),
    event_type=(U32, 12),
    auto_reset=(U32, 16),
    node_id=(U32, 20),
    event_id=(U32, 24),
    event_slot_index=(U32, 28),
)
DESTROY_EVENT = Request("DESTROY_EVENT", 0x40084B09, 8, event_id=(U32, 0))
WAIT_EVENTS = Request(
    "WAIT_EVENTS",
    0xC0184B0C,
    24,
    events_ptr=(U64, 0),
    num_events=(U32, 8),
    wait_for_all=(U32, 12),
    timeout=(U32, 16),
    wait_result=(U32, 20),
)
GET_PROCESS_APERTURES_NEW = Request(
    "GET_PROCESS_APERTURES_NEW",
    0xC0104B14,
    16,
    kfd_process_device_apertures_ptr=(U64, 0),
    num_of_nodes=(U32, 8),
)
ACQUIRE_VM = Request("ACQUIRE_VM", 0x40084B15, 8, drm_fd=(U32, 0), gpu_id=(U32, 4))
ALLOC_MEMORY_OF_GPU = Request(
    "ALLOC_MEMORY_OF_GPU",
    0xC0284B16,
    40,
    va_addr=(U64, 0),
    size=(U64, 8),
    handle=(U64, 16),
    mmap_offset=(U64, 24),
    gpu_id=(U32, 32),
    flags=(U32, 36),
)
FREE_MEMORY_OF_GPU = Request("FREE_MEMORY_OF_GPU", 0x40084B17, 8, handle=(U64, 0))
_MAPPING = {
    "handle": (U64, 0),
    "device_ids_array_ptr": (U64, 8),
    "n_devices": (U32, 16),
    "n_success": (U32, 20),
}
MAP_MEMORY_TO_GPU = Request("MAP_MEMORY_TO_GPU", 0xC0184B18, 24, **_MAPPING)
UNMAP_MEMORY_FROM_GPU = Request("UNMAP_MEMORY_FROM_GPU", 0xC0184B19, 24, **_MAPPING)
AVAILABLE_MEMORY = Request("AVAILABLE_MEMORY", 0xC0104B23, 16, available=(U64, 0), gpu_id=(U32, 8))
RUNTIME_ENABLE = Request(
    "RUNTIME_ENABLE",
    0xC0104B25,
    16,
    r_debug=(U64, 0),
    mode_mask=(U32, 8),
    capabilities_mask=(U32, 12),
)
REQUESTS = (
    *(GET_VERSION, CREATE_QUEUE, DESTROY_QUEUE, CREATE_EVENT, DESTROY_EVENT, WAIT_EVENTS),
    *(GET_PROCESS_APERTURES_NEW, ACQUIRE_VM, ALLOC_MEMORY_OF_GPU, FREE_MEMORY_OF_GPU),
    *(MAP_MEMORY_TO_GPU, UNMAP_MEMORY_FROM_GPU, AVAILABLE_MEMORY, RUNTIME_ENABLE),
)

EVENT_DATA = np.dtype(
    {
        "names": ["gpu_va", "not_present", "event_id"],
        "formats": [U64, U32, U32],
        "offsets": [16, 0, 40],
        "itemsize": 48,
    }
)
"""One event of WAIT_EVENTS; for a memory exception the address and the cause."""

FIRST_MAJOR, FIRST_MINOR = 1, 6
"""The oldest interface that has everything used here."""
RUNTIME_ENABLE_MINOR = 14
QUEUE_COMPUTE = 0
EVENT_HW_EXCEPTION, EVENT_MEMORY = 3, 8
WAIT_COMPLETE, WAIT_TIMEOUT = 0, 1
MOST_PERCENT, PRIORITY = 100, 7


class Memory(IntFlag):
    """Flags of ALLOC_MEMORY_OF_GPU."""

    VRAM = 1 << 0
    GTT = 1 << 1
    UNCACHED = 1 << 25
    COHERENT = 1 << 26
    NO_SUBSTITUTE = 1 << 28
    PUBLIC = 1 << 29
    EXECUTABLE = 1 << 30
    WRITABLE = 1 << 31
