"""Structures of C headers, for comparison with the literals of the package."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import cffi

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


def drm_header(name: str) -> str:
    """A header of the graphics drivers."""
    return (LINUX / name).read_text()
