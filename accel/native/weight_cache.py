"""Arranged weights in the cache folder: written once, then mapped by every process.

An entry is one file: a header page, then matrices as the products read them. Its name is made of
digests of the model file's identity (device, inode, size, times of change), of the weights in it,
and of the texts that the native library is built from. An entry becomes visible by renaming once it
is complete. A complete entry that may not be on disk yet ends in UNSYNCED and is valid until the
machine restarts; after a sync in the background it ends in SYNCED. Whoever opens an entry compares
its size and its time of change with its header, so an entry that was cut or written to is not used.

The folder holds at most MAX_BYTES and MAX_ENTRIES: the entries that were opened least recently
are removed. An entry that a process has mapped may be removed too: the process keeps the file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from accel.digests import DIGEST_BYTES, digest
from contract.arrays import Bytes
from contract.cached_files import (
    PARTIAL,
    CachedFile,
    least_used,
    partial_file,
    partial_name,
    remove_abandoned,
)
from contract.file_reads import PIECE_BYTES, FileRange, read_pages, remember_file
from contract.lazy_dataclass import dataclass

CAN_ALLOCATE = hasattr(os, "posix_fallocate")
"""Whether the system reserves disk space for a file; without that no entry is written."""
MAX_BYTES, MAX_ENTRIES = 32 << 30, 256
"""Most bytes of all entries together, and most entries."""
MIN_BYTES = 4 << 20
"""Fewer bytes are arranged at every start, which takes less than a millisecond."""
FREE_SHARE = 2
"""An entry is written where the disk has this many times its size left."""
HEADER_BYTES = 4096
MAGIC = b"zinc-rt arranged weights 1\n"
SYNCED, UNSYNCED = ".weights", ".unsynced"
"""Endings of an entry on disk, and of a complete one that may not be on disk."""
SOURCE_CHARACTERS, NAME_CHARACTERS = 16, 32
LOCK_SECONDS = 300.0
"""Longest wait for another process that writes the same entry."""
LOCK_POLL_SECONDS = 0.02
RECENT_NANOSECONDS = 20_000_000
"""A file that changed so recently may change again without another time of change."""
LARGE_PAGE_BYTES = 2 << 20
"""Bytes of an entry that are written at a time before it is filled."""
MAX_READ_AHEAD = 1 << 30
"""Most bytes of an entry that are read before they are used."""
MS_SYNC = 4
BOOT = Path("/proc/sys/kernel/random/boot_id")

Identity = tuple[int, int, int, int, int]
"""Of a file: device, inode, size, when its bytes changed, when anything of it changed (both in
nanoseconds)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The name of an entry, the bytes of its matrices, and the open files they are made from."""

    name: str
    nbytes: int
    descriptors: tuple[int, ...]
    sources: tuple[Identity, ...]


def identity(file: int | Path) -> Identity:
    """The identity of a file or of an open descriptor. Raises OSError."""
    status = os.stat(file)
    return (
        *(status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


def entry_of(texts: str, described: Iterable[tuple[FileRange, str]], nbytes: int) -> Entry | None:
    """The entry for weights: where each lies in a file, and how it is arranged.

    ``texts`` is the digest of the code that arranges. None for a file that changed a moment ago."""
    numbers: dict[int, int] = {}
    lines = [texts]
    for part, form in described:
        number = numbers.setdefault(part.descriptor, len(numbers))
        lines.append(f"{number} {part.offset} {part.nbytes} {form}")
    sources = tuple(identity(descriptor) for descriptor in numbers)
    if abs(time.time_ns() - max(source[-1] for source in sources)) < RECENT_NANOSECONDS:
        return None
    lines += map(repr, sources)
    of_lines = digest("\n".join(lines).encode()).hexdigest()
    name = f"{_source_name(sources[0])}-{of_lines[:NAME_CHARACTERS]}"
    return Entry(name, nbytes, tuple(numbers), sources)


def has_entry(folder: Path, model: Path) -> bool:
    """Whether there is an entry of a model file, if maybe one of another build."""
    try:
        names = f"{_source_name(identity(model))}-*"
        return any(path.suffix in (SYNCED, UNSYNCED) for path in folder.glob(names))
    except OSError:
        return False


def usage(folder: Path) -> tuple[int, int]:
    """The number of entries and their bytes."""
    found = _files(folder)
    return len(found), sum(file.nbytes for file in found)


def remove_entries(folder: Path, models: Iterable[Path]) -> int:
    """Remove the entries that were made from model files; gives the bytes freed."""
    names = set()
    for model in models:
        with contextlib.suppress(OSError):
            names.add(identity(model)[:2])
    freed = 0
    for path, size, _ in _files(folder):
        header = _header(path)
        if header is not None and any((s[0], s[1]) in names for s in header["sources"]):
            with contextlib.suppress(OSError):
                _remove(path)
                freed += size
    return freed


def open_entry(folder: Path, entry: Entry) -> Bytes | None:
    """The matrices of an entry, mapped read-only; None if there is no valid one.

    Another process may rename the entry between two looks, hence the third one."""
    for suffix in (SYNCED, UNSYNCED, SYNCED):
        path = folder / f"{entry.name}{suffix}"
        mapped = _mapped(path, entry)
        if mapped is not None:
            if suffix == UNSYNCED:
                _start(_sync, path)
            _start(read_pages, mapped[:MAX_READ_AHEAD])
            return mapped
    return None


def write_entry(folder: Path, entry: Entry, fill: Callable[[Bytes], bool]) -> Bytes | None:
    """Create an entry unless another process has, and map it as ``open_entry`` does.

    ``fill`` writes the matrices and returns when no thread writes any more; False discards the
    entry, and the result is None. Raises OSError if the entry cannot be kept: no room, no
    permission, or the files it is made from changed meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / entry.name):
        mapped = open_entry(folder, entry)
        if mapped is not None:
            return mapped
        for stale in folder.glob(f"{entry.name}.*{PARTIAL}"):
            stale.unlink(missing_ok=True)
        remove_abandoned(folder)
        _make_room(folder, HEADER_BYTES + entry.nbytes)
        partial = partial_name(folder / entry.name)
        with partial_file(partial) as file:
            if not _written(file.fileno(), entry, fill):
                return None
            os.rename(partial, folder / f"{entry.name}{UNSYNCED}")
        return open_entry(folder, entry)


def _written(handle: int, entry: Entry, fill: Callable[[Bytes], bool]) -> bool:
    """Fill a new file; its blocks are allocated first, since a full disk ends who maps it."""
    total = HEADER_BYTES + entry.nbytes
    os.posix_fallocate(handle, 0, total)
    _fill_large_pages(handle, total)
    if not fill(np.frombuffer(mmap.mmap(handle, total), np.uint8)[HEADER_BYTES:]):
        return False
    if tuple(map(identity, entry.descriptors)) != entry.sources:
        raise OSError(errno.ESTALE, "the model file changed while it was arranged")
    modified = time.time_ns()
    fields = {"name": entry.name, "sources": entry.sources, "boot": _boot(), "modified": modified}
    text = MAGIC + json.dumps(fields).encode()
    header = text.ljust(HEADER_BYTES - DIGEST_BYTES)
    if len(header) + DIGEST_BYTES > HEADER_BYTES:
        raise OSError(errno.EFBIG, "the model has too many files")
    os.pwrite(handle, header + digest(header).digest(), 0)
    os.utime(handle, ns=(modified, modified))
    return True


def _fill_large_pages(handle: int, total: int) -> None:
    """Write zeros in large pieces. Linux then keeps each piece in large pages of its cache, which
    are read faster, as they need fewer translations of addresses. What is first stored through a
    mapping lies in single pages of 4 KiB."""
    zeros = bytes(LARGE_PAGE_BYTES)
    for start in range(0, total, LARGE_PAGE_BYTES):
        os.pwrite(handle, zeros[: total - start], start)


def _mapped(path: Path, entry: Entry) -> Bytes | None:
    """A valid entry, noted as used now; None for any other file."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            fields = _fields(file.read(HEADER_BYTES))
            if fields is None or fields["name"] != entry.name:
                return None
            if status.st_size != HEADER_BYTES + entry.nbytes:
                return None
            if status.st_mtime_ns != fields["modified"]:
                return None
            if path.suffix == UNSYNCED and fields["boot"] != _boot():
                return None
            mapping = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
            remember_file(mapping, path, file.fileno())
            with contextlib.suppress(OSError):
                os.utime(file.fileno(), ns=(time.time_ns(), fields["modified"]))
    except OSError:
        return None
    return np.frombuffer(mapping, np.uint8)[HEADER_BYTES:]


def _fields(header: bytes) -> dict[str, Any] | None:
    """Parse a header; None for one that is cut, damaged or of another kind."""
    text, found = header[:-DIGEST_BYTES], header[-DIGEST_BYTES:]
    if not text.startswith(MAGIC) or digest(text).digest() != found:
        return None
    fields: dict[str, Any] = json.loads(text[len(MAGIC) :])
    return fields


def _boot() -> str:
    """A text that changes when the machine restarts; one of its own for each call where the system
    has none."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return os.urandom(16).hex()


def _sync(path: Path) -> None:
    """Write a complete entry to disk, then give it its last name.

    Each call to the system is short, so that the process can end between two of them."""
    with contextlib.suppress(OSError, AttributeError):
        msync = ctypes.CDLL(None, use_errno=True).msync
        msync.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        with path.open("r+b") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            for start in range(0, data.nbytes, PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                if msync(piece.ctypes.data, piece.nbytes, MS_SYNC) != 0:
                    return
            os.fsync(file.fileno())
        os.rename(path, path.with_suffix(SYNCED))


def _start(work: Callable[[Any], None], argument: Any) -> None:
    threading.Thread(target=work, args=(argument,), name="weight cache", daemon=True).start()


def _source_name(source: Identity) -> str:
    return digest(repr(source).encode()).hexdigest()[:SOURCE_CHARACTERS]


def _header(path: Path) -> dict[str, Any] | None:
    for name in _names(path):
        with contextlib.suppress(OSError), name.open("rb") as file:
            return _fields(file.read(HEADER_BYTES))
    return None


def _names(path: Path) -> tuple[Path, ...]:
    """The names that a file of the cache may have by now."""
    return (path, path.with_suffix(SYNCED)) if path.suffix == UNSYNCED else (path,)


def _files(folder: Path) -> list[CachedFile]:
    """Every file of the cache, each once, also one that gets its last name meanwhile."""
    found: dict[Path, CachedFile] = {}
    with contextlib.suppress(OSError):
        for path in (*folder.iterdir(), *folder.iterdir()):
            if path.suffix in (SYNCED, UNSYNCED, PARTIAL):
                for name in _names(path):
                    with contextlib.suppress(OSError):
                        status = name.stat()
                        entry = path.with_suffix(SYNCED) if path.suffix == UNSYNCED else path
                        found[entry] = CachedFile(name, status.st_size, status.st_atime_ns)
    return list(found.values())


def _remove(path: Path) -> None:
    """Remove an entry and its lock. A process that holds the lock loses nothing: the files that it
    and another one write have names of their own."""
    for name in _names(path):
        name.unlink(missing_ok=True)
    path.with_name(f"{path.name.partition('.')[0]}.lock").unlink(missing_ok=True)


def _make_room(folder: Path, nbytes: int) -> None:
    """Remove entries that were not used lately until ``nbytes`` more are allowed. Raises OSError
    if they are too many."""
    disk = os.statvfs(folder)
    if nbytes > MAX_BYTES or disk.f_bavail * disk.f_frsize < FREE_SHARE * nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for file in least_used(_files(folder), MAX_BYTES - nbytes, MAX_ENTRIES - 1):
        _remove(file.path)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by the one process that writes an entry; the system releases it when that process ends.
    Raises OSError after LOCK_SECONDS."""
    # Other systems have no such module, and write no entries.
    import fcntl

    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(handle)
