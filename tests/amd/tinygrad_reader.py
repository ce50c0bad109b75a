"""Run by itself, with a checkout of tinygrad on the path: a trace gone through by its mock GPU.

Memory has to lie where the trace says, so that code can be given addresses as they are; hence a
process of its own. Prints the number of the first submission after which memory differs, or ok."""

import ctypes
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from test.mockgpu.amd.amdgpu import AMDGPU, PM4Executor  # type: ignore[import-not-found]

PAGE = 4096
PROT_READ_WRITE, PRIVATE_ANONYMOUS, NORESERVE, FIXED_NOREPLACE = 3, 0x22, 0x4000, 0x100000
COND_EXEC = 0x22


class Reader(PM4Executor):  # type: ignore[misc]
    """What this executor lacks: COND_EXEC, before which it reads one packet at a time."""

    def execute(self) -> int:
        """See ``PM4Executor``."""
        end, before = self.wptr[0], self.rptr[0]
        while self.rptr[0] < end:
            header = self.queue[self.rptr[0] % (self.size // 4)]
            length = (header >> 16 & 0x3FFF) + 2
            if header >> 8 & 0xFF == COND_EXEC:
                low, high, _, left_out = (self.queue[self.rptr[0] + n] for n in range(1, 5))
                go = ctypes.c_uint32.from_address(low | high << 32).value
                self.rptr[0] += length + (0 if go else left_out)
                continue
            self.wptr[0] = self.rptr[0] + length
            super().execute()
        self.wptr[0] = end
        return int(self.rptr[0] - before)

    def _exec_indirect_buffer(self, n: int) -> None:
        super()._exec_indirect_buffer(n)
        inner = self.ib_executor
        address = ctypes.addressof(ctypes.c_uint32.from_buffer(inner.queue))
        self.ib_executor = Reader(self.gpu, address, inner.size, inner.rptr, inner.wptr)


def reserved(ranges: NDArray[np.uint64]) -> None:
    """Memory from the first address to the last."""
    first = int(ranges[:, 0].min())
    span = int(ranges.sum(axis=1).max()) - first
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = PRIVATE_ANONYMOUS | NORESERVE | FIXED_NOREPLACE
    if libc.mmap(first, span, PROT_READ_WRITE, flags, -1, 0) != first:
        raise SystemExit(f"addresses from {first:#x} on are taken")


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory as it is."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def gone_through(arrays: Any) -> int:
    """The number of the first submission that differs, or of all."""
    names = sorted({name.split(".")[0] for name in arrays.files} - {"format", "names"})
    reserved(np.concatenate([arrays[f"{name}.ranges"] for name in names]))
    gpu = AMDGPU(0)
    for number, name in enumerate(names):
        ranges = arrays[f"{name}.ranges"].tolist()
        gpu.mapped_ranges.clear()
        for address, nbytes in ranges:
            gpu.map_range(address, nbytes)
        pages = arrays[f"{name}.pages"].tolist()
        for address, page in zip(pages, arrays[f"{name}.contents"], strict=True):
            bytes_at(address, PAGE)[:] = page
        words = np.ascontiguousarray(arrays[f"{name}.words"])
        read, write = (memoryview(bytearray(8)).cast("Q") for _ in range(2))
        write[0] = len(words)
        Reader(gpu, words.ctypes.data, words.nbytes, read, write).execute()
        found = [hashlib.sha256(bytes_at(*each).tobytes()).digest() for each in ranges]
        if b"".join(found) != arrays[f"{name}.digests"].tobytes():
            return number
    return len(names)


if __name__ == "__main__":
    with np.load(Path(sys.argv[1]), allow_pickle=False) as loaded:
        print(gone_through(loaded))
