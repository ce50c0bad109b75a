"""Requests and structures are those of the system's header."""

import re
from pathlib import Path
from typing import Any

import cffi
import pytest

from accel.amd import uapi
from accel.amd.uapi import REQUESTS, Request
from tests.amd.headers import declarations, same_fields
from tests.needs import missing

HEADER = Path("/usr/include/linux/kfd_ioctl.h")
STRUCTURES = {"AVAILABLE_MEMORY": "get_available_memory"}
GREW = {"CREATE_QUEUE": 88, "RUNTIME_ENABLE": None, "AVAILABLE_MEMORY": None}
"""Requests that older headers have in another size, or not at all."""


def header_text() -> str:
    if not HEADER.is_file():
        missing(f"{HEADER} does not exist", "apt install linux-libc-dev")
    return HEADER.read_text()


@pytest.fixture(scope="module")
def declared() -> cffi.FFI:
    """Its structures."""
    return declarations(header_text())


def structure(ffi: cffi.FFI, request: Request) -> Any:
    """Its type in the header, None where that is older than the request."""
    name = STRUCTURES.get(request.name, request.name.lower())
    for suffix in ("_args", "_new_args"):
        found = ffi.typeof(f"struct kfd_ioctl_{name}{suffix}")
        if found.fields is not None:
            return found
    return None


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.name)
def test_a_structure_is_the_headers(declared, request_):
    """Offsets and size of every field that is used, and the size in the request's number."""
    found = structure(declared, request_)
    if found is None:
        assert request_.name in GREW
        return
    size = declared.sizeof(found)
    assert size == GREW.get(request_.name, request_.dtype.itemsize) or (
        size == request_.dtype.itemsize
    )
    same_fields(declared, found, request_.dtype)
    assert request_.number >> 16 & 0x3FFF == request_.dtype.itemsize


def test_numbers_are_the_headers():
    """Direction, letter and number of every request it has."""
    text = header_text()
    letter = ord("K")
    directions = {"AMDKFD_IOWR": 3, "AMDKFD_IOR": 2, "AMDKFD_IOW": 1}
    pattern = r"#define AMDKFD_IOC_(\w+)\s*\\?\s*(AMDKFD_\w+)\((0x\w+),"
    known = {name: (directions[kind], int(n, 16)) for name, kind, n in re.findall(pattern, text)}
    checked = 0
    for request in REQUESTS:
        if request.name in known:
            direction, number = known[request.name]
            assert request.number >> 30 == direction, request.name
            assert request.number >> 8 & 0xFF == letter
            assert request.number & 0xFF == number, request.name
            checked += 1
    assert checked >= len(REQUESTS) - len(GREW)


def test_an_event_and_the_flags_of_memory_are_the_headers(declared):
    event = declared.typeof("struct kfd_event_data")
    fault = declared.typeof("struct kfd_hsa_memory_exception_data")
    assert declared.sizeof(event) == uapi.EVENT_DATA.itemsize
    assert uapi.EVENT_DATA.fields is not None
    offsets = {name: offset for name, (_, offset, *_) in uapi.EVENT_DATA.fields.items()}
    assert offsets["event_id"] == dict(event.fields)["event_id"].offset
    assert offsets["gpu_va"] == dict(fault.fields)["va"].offset
    text = header_text()
    for flag in (uapi.Memory.VRAM, uapi.Memory.GTT, uapi.Memory.PUBLIC, uapi.Memory.EXECUTABLE):
        found = re.search(rf"ALLOC_MEM_FLAGS_{flag.name}\s+\(1 << (\d+)\)", text)
        assert found is not None
        assert flag == 1 << int(found[1])
