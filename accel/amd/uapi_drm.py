"""The interface of Linux's graphics driver: requests, structures, constants.

From ``include/uapi/drm/amdgpu_drm.h`` and ``drm.h`` of Linux 6.16 on. Numbers are literals, and a
test compares them with the headers."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from accel.amd.uapi import Request, structure

VERSION = Request(
    *("VERSION", 0xC0406400, 64),
    "u32 version_major@0, u32 version_minor@4, u64 name_len@16, u64 name@24",
)
GEM_CLOSE = Request("GEM_CLOSE", 0x40086409, 8, "u32 handle@0")
SYNCOBJ_CREATE = Request("SYNCOBJ_CREATE", 0xC00864BF, 8, "u32 handle@0, u32 flags@4")
SYNCOBJ_DESTROY = Request("SYNCOBJ_DESTROY", 0xC00864C0, 8, "u32 handle@0")
SYNCOBJ_WAIT = Request(
    *("SYNCOBJ_WAIT", 0xC02864C3, 40),
    "u64 handles@0, u64 timeout_nsec@8, u32 count_handles@16, u32 flags@20",
)
SYNCOBJ_TIMELINE_WAIT = Request(
    *("SYNCOBJ_TIMELINE_WAIT", 0xC03064CA, 48),
    "u64 handles@0, u64 points@8, u64 timeout_nsec@16, u32 count_handles@24, u32 flags@28",
)
GENERAL = (VERSION, GEM_CLOSE, SYNCOBJ_CREATE, SYNCOBJ_DESTROY, SYNCOBJ_WAIT, SYNCOBJ_TIMELINE_WAIT)

GEM_CREATE = Request(
    *("GEM_CREATE", 0xC0206440, 32),
    "u64 bo_size@0, u64 alignment@8, u64 domains@16, u64 domain_flags@24",
)
"""The result, a handle of 32 bits, replaces ``bo_size``."""
GEM_MMAP = Request("GEM_MMAP", 0xC0086441, 8, "u32 handle@0")
"""The result, the 64-bit offset for mmap, replaces the argument."""
CTX = Request("CTX", 0xC0106442, 16, "u32 op@0, u32 flags@4, u32 ctx_id@8")
"""The result replaces ``op``: ``ctx_id``, or for a query 64 bits of flags."""
INFO = Request(
    *("INFO", 0x40206445, 32), "u64 return_pointer@0, u32 return_size@8, u32 query@12, u32 type@16"
)
GEM_VA = Request(
    *("GEM_VA", 0x40406448, 64),
    "u32 handle@0, u32 operation@8, u32 flags@12, u64 va_address@16, u64 offset_in_bo@24, "
    "u64 map_size@32, u64 vm_timeline_point@40, u32 vm_timeline_syncobj_out@48",
)
USERQ = Request(
    *("USERQ", 0xC0486456, 72),
    "u32 op@0, u32 queue_id@4, u32 ip_type@8, u32 doorbell_handle@12, u32 doorbell_offset@16, "
    "u32 flags@20, u64 queue_va@24, u64 queue_size@32, u64 rptr_va@40, u64 wptr_va@48, "
    "u64 mqd@56, u64 mqd_size@64",
)
"""The result, the number of the queue, replaces ``op``."""
USERQ_SIGNAL = Request(
    *("USERQ_SIGNAL", 0xC0306457, 48),
    "u32 queue_id@0, u64 syncobj_handles@8, u16 num_syncobj_handles@16",
)
DRIVERS = (GEM_CREATE, GEM_MMAP, CTX, INFO, GEM_VA, USERQ, USERQ_SIGNAL)
REQUESTS = (*GENERAL, *DRIVERS)

HW_IP = structure(40, "u32 ip_discovery_version@28, u32 userq_num_slots@32")
DEVICE = structure(
    448, "u64 virtual_address_offset@144, u64 virtual_address_max@152, u32 userq_ip_mask@436"
)
MEMORY = structure(96, "u64 vram@0, u64 visible@32")
"""Sizes of the GPU's own memory, and of the part that the host can access."""
FAULT = structure(16, "u64 addr@0, u32 status@8, u32 vmhub@12")
AREAS = structure(16, "u32 eop_size@0, u32 eop_alignment@4")


class Query(IntEnum):
    """Queries of INFO."""

    HW_IP_INFO = 0x02
    DEV_INFO = 0x16
    MEMORY = 0x19
    GPUVM_FAULT = 0x23
    UQ_FW_AREAS = 0x24


class Domain(IntFlag):
    """The memory of an object of GEM_CREATE."""

    GTT = 0x2
    VRAM = 0x4
    DOORBELL = 0x40


class Create(IntFlag):
    """Flags of GEM_CREATE."""

    CPU_ACCESS_REQUIRED = 1 << 0
    COHERENT = 1 << 13


class Page(IntFlag):
    """The GPU's permissions for pages of GEM_VA."""

    READABLE = 1 << 1
    WRITEABLE = 1 << 2
    EXECUTABLE = 1 << 3


VA_MAP = 1
CTX_ALLOC, CTX_FREE, CTX_QUERY_STATE2 = 1, 2, 4
CTX_RESET = 1 << 0
USERQ_CREATE, USERQ_FREE = 1, 2
IP_COMPUTE = 1
MQD_BYTES = 8
"""Size of the descriptor of a compute queue: the address of its end-of-pipe buffer."""
WAIT_ALL, WAIT_FOR_SUBMIT = 1, 2
FIRST_MAJOR, FIRST_MINOR = 3, 64
"""The oldest interface with information about user queues: Linux 6.16."""
NOT_SUPPORTED = 524
"""ENOTSUPP, for which C libraries have no name."""
EOP_BYTES = 4096
"""Size of the end-of-pipe buffer where a kernel does not report it."""
