"""Mapped files that steps read, and whether all of their bytes could be read."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

from accel.native.library import Library
from contract.arrays import Bytes
from contract.errors import ModelFileError
from contract.file_reads import FileRange, file_range


class MappedFiles:
    """Guards mappings against programs that cut their files, and against disks that fail.

    What can no longer be read is read as zeros, by every thread of the process, until ``check``
    says so. See ``guard.c``."""

    def __init__(self, library: Library) -> None:
        self._library = library.quick
        self._library.zinc_guard.argtypes = ctypes.c_uint64, ctypes.c_uint64
        self._library.zinc_lost.restype = ctypes.c_uint64
        self._faults = ctypes.c_uint32.in_dll(library.handle, "zinc_faults")
        self._guarded: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, Path, int]] = (
            weakref.WeakKeyDictionary()
        )

    def guard(self, data: Bytes) -> FileRange | None:
        """Guard the file that ``data`` is a part of, as long as it is mapped; where the data lies
        in it, None for data that is no part of a file."""
        found = file_range(data)
        if found is not None and found.mapping not in self._guarded:
            start = data.ctypes.data - found.offset
            number = self._library.zinc_guard(start, len(found.mapping))
            if number >= 0:
                self._guarded[found.mapping] = number, found.path, found.descriptor
                weakref.finalize(found.mapping, self._library.zinc_unguard, number)
        return found

    def check(self) -> None:
        """Raise ModelFileError when a byte of a guarded file could not be read."""
        if not self._faults.value:
            return
        for number, path, descriptor in list(self._guarded.values()):
            lost = self._library.zinc_lost(number)
            if lost:
                size = os.fstat(descriptor).st_size
                problem = f"cannot be read any more; the file has {size} bytes now"
                remedy = "load the model again and leave its file alone"
                raise ModelFileError(path, f"byte {lost - 1}", problem, remedy)
