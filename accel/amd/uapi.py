"""The interface of Linux's amdkfd driver: requests, structures, constants.

From ``include/uapi/linux/kfd_ioctl.h``, interface 1.17. Numbers are literals, and a test compares
them with the system's headers."""

from __future__ import annotations

import re
from enum import IntFlag
from typing import Any

import numpy as np

from contract.arrays import Records

FORMATS = {"u16": "<u2", "u32": "<u4", "u64": "<u8"}


def structure(nbytes: int, fields: str) -> np.dtype[np.void]:
    """The structure of ``nbytes`` bytes with ``fields`` such as ``u32 gpu_id@4``: type, name and
    offset of each."""
    found = re.findall(r"(\w+) (\w+)@(\d+)", fields)
    layout: Any = {
        "names": [name for _, name, _ in found],
        "formats": [FORMATS[kind] for kind, _, _ in found],
        "offsets": [int(offset) for *_, offset in found],
        "itemsize": nbytes,
    }
    made: np.dtype[np.void] = np.dtype(layout)
    return made


class Request:
    """One ioctl: its number and the structure of its argument."""

    def __init__(self, name: str, number: int, nbytes: int, fields: str) -> None:
        self.name = name
        self.number = number
        self.dtype = structure(nbytes, fields)

    def argument(self, **values: int) -> Records:
        """A structure of zeros except for ``values``, as an array of one."""
        made = np.zeros(1, self.dtype)
        for name, value in values.items():
            made[name] = value
        return made


GET_VERSION = Request("GET_VERSION", 0x80084B01, 8, "u32 major_version@0, u32 minor_version@4")
CREATE_QUEUE = Request(
    *("CREATE_QUEUE", 0xC0604B02, 96),
    "u64 ring_base_address@0, u64 write_pointer_address@8, u64 read_pointer_address@16, "
    "u64 doorbell_offset@24, u32 ring_size@32, u32 gpu_id@36, u32 queue_type@40, "
    "u32 queue_percentage@44, u32 queue_priority@48, u32 queue_id@52, u64 eop_buffer_address@56, "
    "u64 eop_buffer_size@64, u64 ctx_save_restore_address@72, u32 ctx_save_restore_size@80, "
    "u32 ctl_stack_size@84",
)
DESTROY_QUEUE = Request("DESTROY_QUEUE", 0xC0084B03, 8, "u32 queue_id@0")
CREATE_EVENT = Request(
    *("CREATE_EVENT", 0xC0204B08, 32),
    "u64 event_page_offset@0, u32 event_trigger_data@8, u32 event_type@12, u32 auto_reset@16, "
    "u32 node_id@20, u32 event_id@24, u32 event_slot_index@28",
)
DESTROY_EVENT = Request("DESTROY_EVENT", 0x40084B09, 8, "u32 event_id@0")
WAIT_EVENTS = Request(
    *("WAIT_EVENTS", 0xC0184B0C, 24),
    "u64 events_ptr@0, u32 num_events@8, u32 wait_for_all@12, u32 timeout@16, u32 wait_result@20",
)
GET_PROCESS_APERTURES_NEW = Request(
    *("GET_PROCESS_APERTURES_NEW", 0xC0104B14, 16),
    "u64 kfd_process_device_apertures_ptr@0, u32 num_of_nodes@8",
)
ACQUIRE_VM = Request("ACQUIRE_VM", 0x40084B15, 8, "u32 drm_fd@0, u32 gpu_id@4")
ALLOC_MEMORY_OF_GPU = Request(
    *("ALLOC_MEMORY_OF_GPU", 0xC0284B16, 40),
    "u64 va_addr@0, u64 size@8, u64 handle@16, u64 mmap_offset@24, u32 gpu_id@32, u32 flags@36",
)
FREE_MEMORY_OF_GPU = Request("FREE_MEMORY_OF_GPU", 0x40084B17, 8, "u64 handle@0")
MAP_MEMORY_TO_GPU = Request(
    *("MAP_MEMORY_TO_GPU", 0xC0184B18, 24),
    "u64 handle@0, u64 device_ids_array_ptr@8, u32 n_devices@16, u32 n_success@20",
)
UNMAP_MEMORY_FROM_GPU = Request(
    *("UNMAP_MEMORY_FROM_GPU", 0xC0184B19, 24),
    "u64 handle@0, u64 device_ids_array_ptr@8, u32 n_devices@16, u32 n_success@20",
)
AVAILABLE_MEMORY = Request("AVAILABLE_MEMORY", 0xC0104B23, 16, "u64 available@0, u32 gpu_id@8")
RUNTIME_ENABLE = Request(
    *("RUNTIME_ENABLE", 0xC0104B25, 16), "u64 r_debug@0, u32 mode_mask@8, u32 capabilities_mask@12"
)
REQUESTS = (
    *(GET_VERSION, CREATE_QUEUE, DESTROY_QUEUE, CREATE_EVENT, DESTROY_EVENT, WAIT_EVENTS),
    *(GET_PROCESS_APERTURES_NEW, ACQUIRE_VM, ALLOC_MEMORY_OF_GPU, FREE_MEMORY_OF_GPU),
    *(MAP_MEMORY_TO_GPU, UNMAP_MEMORY_FROM_GPU, AVAILABLE_MEMORY, RUNTIME_ENABLE),
)

EVENT_DATA = structure(48, "u64 gpu_va@16, u32 not_present@0, u32 event_id@40")
"""One event of WAIT_EVENTS; for a memory exception the address and the cause."""

FIRST_MAJOR, FIRST_MINOR = 1, 6
"""The oldest interface that has everything used here."""
RUNTIME_ENABLE_MINOR = 14
QUEUE_COMPUTE = 0
EVENT_HW_EXCEPTION, EVENT_MEMORY = 3, 8
WAIT_COMPLETE, WAIT_TIMEOUT = 0, 1
MAX_PERCENT, PRIORITY = 100, 7


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
