"""One GGUF file on disk: opened, mapped read-only and parsed."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from contract.errors import ModelFileError, system_words
from contract.file_reads import remember_file
from contract.lazy_dataclass import dataclass
from reference.model.gguf.header import Header, parse_header

# Opening a FIFO must fail, not wait for a writer. Windows has neither flag.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """A mapped file. ``size`` (bytes) and ``modified_ns`` are those at opening."""

    path: Path
    descriptor: int
    mapping: mmap.mmap
    size: int
    modified_ns: int
    header: Header

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """A read-only view of ``nbytes`` bytes at a byte offset, uint8."""
        return np.frombuffer(self.mapping, np.uint8, nbytes, offset)

    def check_unchanged(self) -> None:
        """Raise ModelFileError when the file was resized or written since it was opened."""
        status = os.fstat(self.descriptor)
        if status.st_size != self.size:
            change = f"was {self.size} bytes when opened and is {status.st_size} now"
        elif status.st_mtime_ns != self.modified_ns:
            change = "was written to since it was opened"
        else:
            return
        raise ModelFileError(
            self.path, "the whole file", change, "load the model again and leave its file alone"
        )

    def close(self) -> None:
        """Close the descriptor. The file is unmapped when the last view of it is gone."""
        os.close(self.descriptor)


def open_shard(path: Path, number: int) -> Shard:
    """Map and parse the file ``path`` as shard ``number``; raises ModelFileError."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        raise ModelFileError(
            path, "the file", "does not exist", "check the path or fetch the model"
        ) from None
    except (OSError, ValueError) as error:
        raise _cannot("opened", path, error) from None
    try:
        return _map(path, descriptor, number)
    except BaseException:
        os.close(descriptor)
        raise


def _map(path: Path, descriptor: int, number: int) -> Shard:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(path, "the file", "is a directory", "name the .gguf file inside it")
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(
            path, "the file", "is a pipe, socket or device", "give an ordinary file"
        )
    if status.st_size == 0:
        raise ModelFileError(path, "the file", "is empty", "fetch the model again")
    try:
        mapping = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise _cannot(f"mapped ({status.st_size} bytes)", path, error) from None
    remember_file(mapping, path, descriptor)
    header = parse_header(mapping, status.st_size, path, number)
    return Shard(path, descriptor, mapping, status.st_size, status.st_mtime_ns, header)


def _cannot(action: str, path: Path, error: Exception) -> ModelFileError:
    full = isinstance(error, OSError) and error.errno == errno.ENOMEM
    remedy = "raise this process's limit (ulimit -v)" if full else "check it and its disk"
    return ModelFileError(path, "the file", f"cannot be {action}: {system_words(error)}", remedy)
