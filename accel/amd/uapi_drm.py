"""The interface of Linux's graphics driver: requests, structures, constants.

From ``include/uapi/drm/amdgpu_drm.h`` and ``drm.h`` of Linux 6.16 on. Numbers are literals, and a
test compares them with the headers.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

from accel.amd.uapi import U32, U64, Request

VERSION = Request(
    "VERSION",
    0xC0406400,
    64,
    version_major=(U32, 0),
    version_minor=(U32, 4),
    name_len=(U64, 16),
    name=(U64, 24),
)
GEM_CLOSE = Request("GEM_CLOSE", 0x40086409, 8, handle=(U32, 0))
SYNCOBJ_CREATE = Request("SYNCOBJ_CREATE", 0xC00864BF, 8, handle=(U32, 0), flags=(U32, 4))
SYNCOBJ_DESTROY = Request("SYNCOBJ_DESTROY", 0xC00864C0, 8, handle=(U32, 0))
SYNCOBJ_WAIT = Request(
    "SYNCOBJ_WAIT",
    0xC02864C3,
    40,
    handles=(U64, 0),
    timeout_nsec=(U64, 8),
    count_handles=(U32, 16),
    flags=(U32, 20),
)
SYNCOBJ_TIMELINE_WAIT = Request(
    "SYNCOBJ_TIMELINE_WAIT",
    0xC03064CA,
    48,
    handles=(U64, 0),
    points=(U64, 8),
    timeout_nsec=(U64, 16),
    count_handles=(U32, 24),
    flags=(U32, 28),
)
GENERAL = (VERSION, GEM_CLOSE, SYNCOBJ_CREATE, SYNCOBJ_DESTROY, SYNCOBJ_WAIT, SYNCOBJ_TIMELINE_WAIT)

GEM_CREATE = Request(
    "GEM_CREATE",
    0xC0206440,
    32,
    bo_size=(U64, 0),
    alignment=(U64, 8),
    domains=(U64, 16),
    domain_flags=(U64, 24),
)
"""The result, a handle of 32 bits, replaces ``bo_size``."""
GEM_MMAP = Request("GEM_MMAP", 0xC0086441, 8, handle=(U32, 0))
"""The result, the 64-bit offset for mmap, replaces the argument."""
CTX = Request("CTX", 0xC0106442, 16, op=(U32, 0), flags=(U32, 4), ctx_id=(U32, 8))
"""The result replaces ``op``: ``ctx_id``, or for a query 64 bits of flags."""
INFO = Request(
    "INFO",
    0x40206445,
    32,
    return_pointer=(U64, 0),
    return_size=(U32, 8),
    query=(U32, 12),
    type=(U32, 16),
)
GEM_VA = Request(
    "GEM_VA",
    0x40406448,
    64,
    handle=(U32, 0),
    operation=(U32, 8),
    flags=(U32, 12),
    va_address=(U64, 16),
    offset_in_bo=(U64, 24),
    map_size=(U64, 32),
    vm_timeline_point=(U64, 40),
    vm_timeline_syncobj_out=(U32, 48),
)
USERQ = Request(
    "USERQ",
    0xC0486456,
    72,
    op=(U32, 0),
    queue_id=(U32, 4),
    ip_type=(U32, 8),
    doorbell_handle=(U32, 12),
    doorbell_offset=(U32, 16),
    flags=(U32, 20),
    queue_va=(U64, 24),
    queue_size=(U64, 32),
    rptr_va=(U64, 40),
    wptr_va=(U64, 48),
    mqd=(U64, 56),
    mqd_size=(U64, 64),
)
"""The result, the number of the queue, replaces ``op``."""
USERQ_SIGNAL = Request(
    "USERQ_SIGNAL",
    0xC0306457,
    48,
    queue_id=(U32, 0),
    syncobj_handles=(U64, 8),
    num_syncobj_handles=("<u2", 16),
)
DRIVERS = (GEM_CREATE, GEM_MMAP, CTX, INFO, GEM_VA, USERQ, USERQ_SIGNAL)
REQUESTS = (*GENERAL, *DRIVERS)

HW_IP = np.dtype(
    {
        "names": ["ip_discovery_version", "userq_num_slots"],
        "formats": [U32, U32],
        "offsets": [28, 32],
        "itemsize": 40,
    }
)
DEVICE = np.dtype(
    {
        "names": ["virtual_address_offset", "virtual_address_max", "userq_ip_mask"],
        "formats": [U64, U64, U32],
        "offsets": [144, 152, 436],
        "itemsize": 448,
    }
)
MEMORY = np.dtype(
    {
        "names": ["vram", "visible"],
        "formats": [U64, U64],
        "offsets": [0, 32],
        "itemsize": 96,
    }
)
"""Sizes of the GPU's own memory, and of the part that the host can access."""
FAULT = np.dtype([("addr", U64), ("status", U32), ("vmhub", U32)])
AREAS = np.dtype(
    {
        "names": ["eop_size", "eop_alignment"],
        "formats": [U32, U32],
        "offsets": [0, 4],
        "itemsize": 16,
    }
)


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
