"""Requests and structures of the graphics driver are those of Linux's headers."""

import re

import cffi
import pytest

from accel.amd import uapi_drm as drm
from accel.amd.uapi import Request
from tests.amd.headers import declarations, drm_header, same_fields

STRUCTURES = {
    "VERSION": "struct drm_version", "GEM_CLOSE": "struct drm_gem_close",
    "SYNCOBJ_CREATE": "struct drm_syncobj_create", "SYNCOBJ_DESTROY": "struct drm_syncobj_destroy",
    "SYNCOBJ_WAIT": "struct drm_syncobj_wait",
    "SYNCOBJ_TIMELINE_WAIT": "struct drm_syncobj_timeline_wait",
    "GEM_CREATE": "union drm_amdgpu_gem_create", "GEM_MMAP": "union drm_amdgpu_gem_mmap",
    "CTX": "union drm_amdgpu_ctx", "INFO": "struct drm_amdgpu_info",
    "GEM_VA": "struct drm_amdgpu_gem_va", "USERQ": "union drm_amdgpu_userq",
    "USERQ_SIGNAL": "struct drm_amdgpu_userq_signal",
}  # fmt: skip
IN = {
    "GEM_CREATE": "struct drm_amdgpu_gem_create_in",
    "GEM_MMAP": "struct drm_amdgpu_gem_mmap_in",
    "CTX": "struct drm_amdgpu_ctx_in",
    "USERQ": "struct drm_amdgpu_userq_in",
}
"""Of unions the half that is sent."""
ANSWERS = {
    "HW_IP": ("struct drm_amdgpu_info_hw_ip", drm.HW_IP),
    "DEVICE": ("struct drm_amdgpu_info_device", drm.DEVICE),
    "FAULT": ("struct drm_amdgpu_info_gpuvm_fault", drm.FAULT),
    "AREAS": ("struct drm_amdgpu_info_uq_metadata_compute", drm.AREAS),
}


@pytest.fixture(scope="module")
def text() -> str:
    """Both headers."""
    return drm_header("drm.h") + drm_header("amdgpu_drm.h")


@pytest.fixture(scope="module")
def declared(text) -> cffi.FFI:
    """Their structures that matter here."""
    names = [*STRUCTURES.values(), *IN.values(), *(name for name, _ in ANSWERS.values())]
    parts = (
        *("drm_amdgpu_gem_create_out", "drm_amdgpu_gem_mmap_out", "drm_amdgpu_userq_out"),
        *("drm_amdgpu_ctx_out", "drm_amdgpu_query_fw", "drm_amdgpu_heap_info"),
        *("drm_amdgpu_memory_info", "drm_amdgpu_userq_mqd_compute_gfx11"),
    )
    return declarations(text, {*(name.split()[1] for name in names), *parts})


@pytest.mark.parametrize("request_", drm.REQUESTS, ids=lambda request: request.name)
def test_a_structure_is_the_headers(declared, request_):
    whole = declared.typeof(STRUCTURES[request_.name])
    assert declared.sizeof(whole) == request_.dtype.itemsize
    sent = declared.typeof(IN.get(request_.name, STRUCTURES[request_.name]))
    layout = request_.dtype
    if request_ is drm.INFO:
        # The engine is the first word of a union without a name.
        kept = [name for name in layout.names or () if name != "type"]
        assert declared.offsetof("struct drm_amdgpu_info", "query_hw_ip") == 16
        layout = layout[kept]
    same_fields(declared, sent, layout)


def test_numbers_are_the_headers(text):
    """Direction, letter, number and size of every request."""
    base = int(re.search(r"DRM_COMMAND_BASE\s+(0x\w+)", text)[1], 16)  # type: ignore[index]
    own = dict(re.findall(r"#define DRM_AMDGPU_(\w+)\s+(0x\w+)", text))
    kinds = re.findall(r"#define DRM_IOCTL_AMDGPU_(\w+)\s+(DRM_IO\w+)\(", text)
    general = re.findall(r"#define DRM_IOCTL_(\w+)\s+(DRM_IO\w+)\s?\((0x\w+),", text)
    known = {name: (kind, int(number, 16)) for name, kind, number in general}
    known |= {name: (kind, base + int(own[name], 16)) for name, kind in kinds if name in own}
    directions = {"DRM_IOWR": 3, "DRM_IOR": 2, "DRM_IOW": 1}
    for request in drm.REQUESTS:
        kind, number = known[request.name]
        assert request.number >> 30 == directions[kind], request.name
        assert request.number >> 16 & 0x3FFF == request.dtype.itemsize, request.name
        assert request.number >> 8 & 0xFF == ord("d")
        assert request.number & 0xFF == number, request.name


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_headers(declared, name):
    structure, layout = ANSWERS[name]
    found = declared.typeof(structure)
    assert declared.sizeof(found) <= layout.itemsize
    same_fields(declared, found, layout)


def test_memory_and_results_are_the_headers(declared):
    """Sizes of heaps; where the results of unions lie; a descriptor is an address."""
    memory = "struct drm_amdgpu_memory_info"
    assert declared.sizeof(memory) == drm.MEMORY.itemsize
    assert declared.offsetof(memory, "cpu_accessible_vram") == 32
    heap = dict(declared.typeof("struct drm_amdgpu_heap_info").fields)
    assert heap["total_heap_size"].offset == 0
    for structure, field, nbytes in (
        ("struct drm_amdgpu_userq_out", "queue_id", 4),
        ("struct drm_amdgpu_gem_create_out", "handle", 4),
        ("struct drm_amdgpu_gem_mmap_out", "addr_ptr", 8),
    ):
        found = dict(declared.typeof(structure).fields)[field]
        assert (found.offset, declared.sizeof(found.type)) == (0, nbytes)
    assert declared.sizeof("struct drm_amdgpu_userq_mqd_compute_gfx11") == drm.MQD_BYTES


CONSTANTS = {
    "AMDGPU_INFO_HW_IP_INFO": drm.Query.HW_IP_INFO, "AMDGPU_INFO_DEV_INFO": drm.Query.DEV_INFO,
    "AMDGPU_INFO_MEMORY": drm.Query.MEMORY, "AMDGPU_INFO_GPUVM_FAULT": drm.Query.GPUVM_FAULT,
    "AMDGPU_INFO_UQ_FW_AREAS": drm.Query.UQ_FW_AREAS, "AMDGPU_GEM_DOMAIN_GTT": drm.Domain.GTT,
    "AMDGPU_GEM_DOMAIN_VRAM": drm.Domain.VRAM, "AMDGPU_GEM_DOMAIN_DOORBELL": drm.Domain.DOORBELL,
    "AMDGPU_VA_OP_MAP": drm.VA_MAP, "AMDGPU_CTX_OP_ALLOC_CTX": drm.CTX_ALLOC,
    "AMDGPU_CTX_OP_FREE_CTX": drm.CTX_FREE, "AMDGPU_CTX_OP_QUERY_STATE2": drm.CTX_QUERY_STATE2,
    "AMDGPU_USERQ_OP_CREATE": drm.USERQ_CREATE, "AMDGPU_USERQ_OP_FREE": drm.USERQ_FREE,
    "AMDGPU_HW_IP_COMPUTE": drm.IP_COMPUTE,
}  # fmt: skip
SHIFTED = {
    "AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED": drm.Create.CPU_ACCESS_REQUIRED,
    "AMDGPU_GEM_CREATE_COHERENT": drm.Create.COHERENT,
    "AMDGPU_VM_PAGE_READABLE": drm.Page.READABLE,
    "AMDGPU_VM_PAGE_WRITEABLE": drm.Page.WRITEABLE,
    "AMDGPU_VM_PAGE_EXECUTABLE": drm.Page.EXECUTABLE,
    "AMDGPU_CTX_QUERY2_FLAGS_RESET": drm.CTX_RESET,
    "DRM_SYNCOBJ_WAIT_FLAGS_WAIT_ALL": drm.WAIT_ALL,
    "DRM_SYNCOBJ_WAIT_FLAGS_WAIT_FOR_SUBMIT": drm.WAIT_FOR_SUBMIT,
}


def test_constants_are_the_headers(text):
    for name, value in CONSTANTS.items():
        found = re.search(rf"#define {name}\s+(0x\w+|\d+)", text)
        assert found is not None, name
        assert int(found[1], 0) == value, name
    for name, value in SHIFTED.items():
        found = re.search(rf"#define {name}\s+\(1 ?<< ?(\d+)\)", text)
        assert found is not None, name
        assert 1 << int(found[1]) == value, name


def test_an_offset_that_is_wrong_is_noticed(declared):
    """Negative control: two fields changed over."""
    wrong = Request("GEM_VA", 0x40406448, 64, "u32 handle@8, u32 operation@0")
    with pytest.raises(AssertionError):
        test_a_structure_is_the_headers(declared, wrong)
