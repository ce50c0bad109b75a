"""Fast copies of mapped files: the bytes are read with ``preadv`` instead of through the mapping.

The first access to a page of a mapping waits until the kernel has entered it in the page table of
the process, a few pages of 4 KiB at a time. For many gigabytes it is faster to let the kernel copy
from its cache or the disk, which leaves the page table alone.
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
_HAS_PREADV = hasattr(os, "preadv")


def remember_file(mapping: mmap.mmap, descriptor: int) -> None:
    """Remember that ``mapping`` maps the whole file behind ``descriptor``. The descriptor is
    duplicated, so the caller may close it."""
    if _HAS_PREADV:
        own = _DESCRIPTORS[mapping] = os.dup(descriptor)
        weakref.finalize(mapping, os.close, own)


def copy_bytes(target: Bytes, data: Bytes) -> None:
    """Copy ``data`` into ``target``, which is contiguous and has the same shape.

    The file is read when ``data`` is a contiguous part of a remembered mapping; otherwise, and when
    reading fails, this is ``np.copyto``.
    """
    found = _file_of(data) if data.flags.c_contiguous else None
    if found is not None:
        descriptor, offset = found
        with suppress(OSError):
            if os.preadv(descriptor, [target.reshape(-1).data], offset) == data.nbytes:
                return
    np.copyto(target, data)


def _file_of(data: Bytes) -> tuple[int, int] | None:
    """The descriptor and byte offset in the file that ``data`` is mapped from; None when
    unknown."""
    owner: object = data
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or owner not in _DESCRIPTORS:
        return None
    start: int = np.frombuffer(owner, np.uint8).ctypes.data
    return _DESCRIPTORS[owner], data.ctypes.data - start
