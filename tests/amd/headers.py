"""Structures of C headers, for comparison with the literals of the package."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import cffi
import numpy as np

TYPES = "typedef unsigned long __kernel_size_t; typedef int drm_handle_t;"
LINUX = Path(__file__).parent / "linux"
"""Headers of Linux 7.2, newer than most systems have."""


def declarations(text: str, requested: Collection[str] | None = None) -> cffi.FFI:
    """All structures and unions, or those ``requested``, without what a C preprocessor would take
    out."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    constants = dict(re.findall(r"^#define (\w+)\s+(\d+)\s*$", text, re.MULTILINE))
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    found = re.findall(r"^((?:struct|union) (\w+)\s+\{.*?^\};)", text, re.MULTILINE | re.DOTALL)
    ffi = cffi.FFI()
    ffi.cdef(TYPES)
    for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long")):
        ffi.cdef(f"typedef unsigned {name} __u{bits}; typedef {name} __s{bits};")
    for body, name in found:
        if requested is None or name in requested:
            known = re.sub(r"\[(\w+)\]", lambda m: f"[{constants.get(m[1], m[1])}]", body)
            ffi.cdef(known, override=True)
    return ffi


def same_fields(ffi: cffi.FFI, found: Any, layout: np.dtype[np.void]) -> None:
    """Offsets and sizes of every field that is used."""
    fields = dict(found.fields)
    assert layout.fields is not None
    for name, (kind, offset, *_) in layout.fields.items():
        assert fields[name].offset == offset, name
        assert ffi.sizeof(fields[name].type) == kind.itemsize, name


def drm_header(name: str) -> str:
    """A header of the graphics drivers."""
    return (LINUX / name).read_text()
