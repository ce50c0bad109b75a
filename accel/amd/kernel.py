"""The operating system's side of a GPU: files, ioctls, memory maps, the doorbell.

Tiers make every system call through one ``Kernel``."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.amd.uapi import Request
from contract.arrays import Bytes, Records

PROT_NONE, PROT_READ_WRITE = 0, 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED = 1, 2, 0x10
MAP_ANONYMOUS, MAP_NORESERVE = 0x20, 0x4000

_open_files: dict[str, int] = {}


class Kernel:
    """The system this process runs on; ``accel.amd.sim.fake_kernel`` replaces every function. Each
    raises OSError as its system call does."""

    simulated = False

    def __init__(self) -> None:
        self.open_files = _open_files
        """Files by path that stay open as long as the process runs."""

    def open(self, path: str) -> int:
        """Open a file for reading and writing; programs that this one starts do not inherit it."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def ioctl(self, file: int, request: Request, argument: Records) -> None:
        """Make one request, which changes the argument in place; one that a signal interrupts is
        repeated."""
        while _libc().ioctl(file, request.number, argument.ctypes.data) < 0:
            number = ctypes.get_errno()
            if number != 4:
                raise OSError(number, f"{request.name}: {os.strerror(number)}")

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of unused addresses."""
        return _mapped(0, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)

    def map(self, address: int, nbytes: int, file: int, offset: int) -> int:
        """Map a file from ``offset`` on, at ``address`` or anywhere if that is 0."""
        fixed = MAP_FIXED if address else 0
        return _mapped(address, nbytes, PROT_READ_WRITE, MAP_SHARED | fixed, file, offset)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap a range of addresses."""
        if _libc().munmap(address, nbytes) < 0:
            raise OSError(ctypes.get_errno(), "munmap")

    def view(self, address: int, nbytes: int) -> Bytes:
        """The bytes of mapped memory."""
        return memory_at(address, nbytes)

    def read_text(self, path: str) -> str:
        """The text of a file."""
        return Path(path).read_text()

    def names(self, path: str) -> list[str]:
        """The names in a folder."""
        return sorted(os.listdir(path))

    def ring(self, doorbell: NDArray[np.uint64], value: int) -> None:
        """Store to a doorbell, after all earlier stores, which x86-64 makes visible in order."""
        doorbell[0] = value

    def idle(self) -> None:
        """Called while a fence is polled: the device runs by itself."""

    def complaint(self) -> str:
        """Details of a fault, or where to find them."""
        return "dmesg says more"


def memory_at(address: int, nbytes: int) -> Bytes:
    """The bytes at an address of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    )
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    return library


def _mapped(address: int, nbytes: int, access: int, flags: int, file: int, offset: int) -> int:
    # The offset of a doorbell has bit 63 set, which makes an off_t negative.
    signed = offset - (1 << 64) if offset >> 63 else offset
    found = _libc().mmap(address or None, nbytes, access, flags, file, signed)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap: {os.strerror(number)}")
    assert isinstance(found, int)
    return found
