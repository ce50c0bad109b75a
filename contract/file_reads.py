"""Mapped files: where a view of one begins, fast copies, and reading one ahead of its use.

The first access to a page of a mapping waits until the kernel has entered it in the page table of
the process, a few pages of 4 KiB at a time. For many gigabytes it is faster to let the kernel copy
from its cache or the disk, which leaves the page table alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from contract.arrays import Bytes
from contract.lazy_dataclass import dataclass

_FILES: weakref.WeakKeyDictionary[mmap.mmap, tuple[Path, int]] = weakref.WeakKeyDictionary()
_HAS_PREADV = hasattr(os, "preadv")
PIECE_BYTES = 1 << 25
"""Bytes read ahead per call; during a call the process can map no other memory."""
_POPULATE_READ = 22
"""The value of MADV_POPULATE_READ, from Linux 5.14 on. Other systems refuse it without harm."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a mapped file from ``offset`` on; ``descriptor`` is open as long as the mapping."""

    path: Path
    mapping: mmap.mmap
    descriptor: int
    offset: int
    nbytes: int

    @property
    def whole(self) -> FileRange:
        """All of the file."""
        return FileRange(self.path, self.mapping, self.descriptor, 0, len(self.mapping))

    def forget_pages(self) -> None:
        """Remove the whole pages of the range from this process's page table.

        The bytes stay readable, and the kernel keeps them in its cache of files."""
        first = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.offset + self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


def remember_file(mapping: mmap.mmap, path: Path, descriptor: int) -> None:
    """Remember that ``mapping`` maps the whole file at ``path``, open as ``descriptor``. The
    descriptor is duplicated, so the caller may close it."""
    if _HAS_PREADV:
        own = os.dup(descriptor)
        _FILES[mapping] = path, own
        weakref.finalize(mapping, os.close, own)


def copy_bytes(target: Bytes, data: Bytes) -> None:
    """Copy ``data`` into ``target``, which is contiguous and has the same shape.

    The file is read when ``data`` is a contiguous part of a remembered mapping; otherwise, and when
    reading fails, this is ``np.copyto``."""
    found = file_range(data)
    if found is not None:
        with suppress(OSError):
            buffers = [target.reshape(-1).data]
            if os.preadv(found.descriptor, buffers, found.offset) == data.nbytes:
                return
    np.copyto(target, data)


def read_pages(data: Bytes) -> None:
    """Read mapped bytes from disk and enter their pages in this process's page table.

    Does nothing where the system cannot; a thread that calls it leaves Python's lock free."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for start in range(0, data.nbytes, PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            before = piece.ctypes.data % mmap.PAGESIZE
            if madvise(piece.ctypes.data - before, piece.nbytes + before, _POPULATE_READ) != 0:
                return


def file_range(data: Bytes) -> FileRange | None:
    """The position of contiguous ``data`` in a remembered mapping; None for any other array."""
    if not data.flags.c_contiguous:
        return None
    owner: object = data
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or owner not in _FILES:
        return None
    start: int = np.frombuffer(owner, np.uint8).ctypes.data
    path, descriptor = _FILES[owner]
    return FileRange(path, owner, descriptor, data.ctypes.data - start, data.nbytes)
