"""Bytes of mapped files, read from the file itself.

Who touches a page of a mapping for the first time waits for the kernel to enter it in the process's
table, 4 KiB at a time or a few of them. A copy of many gigabytes is faster when the kernel copies,
out of its cache or from the disk, and the table stays as it is.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_DESCRIPTORS: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
_READS_INTO_PLACE = hasattr(os, "preadv")


def remember_file(mapping: mmap.mmap, descriptor: int) -> None:
    """``mapping`` is of the whole file behind ``descriptor``, which the caller may close."""
    if _READS_INTO_PLACE:
        own = _DESCRIPTORS[mapping] = os.dup(descriptor)
        weakref.finalize(mapping, os.close, own)


def copy_bytes(target: Bytes, data: Bytes) -> None:
    """Put ``data`` into ``target``, contiguous and of the same shape: as ``np.copyto``, which it is
    where ``data`` is not contiguous, not of a remembered mapping, or cannot be read."""
    found = _file_of(data) if data.flags.c_contiguous else None
    if found is not None:
        descriptor, offset = found
        with suppress(OSError):
            if os.preadv(descriptor, [target.reshape(-1).data], offset) == data.nbytes:
                return
    np.copyto(target, data)


def _file_of(data: Bytes) -> tuple[int, int] | None:
    """Descriptor and offset of the file that ``data`` are mapped from."""
    owner: object = data
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or owner not in _DESCRIPTORS:
        return None
    start: int = np.frombuffer(owner, np.uint8).ctypes.data
    return _DESCRIPTORS[owner], data.ctypes.data - start
