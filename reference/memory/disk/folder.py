"""The folder of the disk cache: its secret, atomic writes, and the limit on its size.

    DIR/zinc-rt-kv/secret            random bytes, which key all names and checksums
    DIR/zinc-rt-kv/SCOPE/NAME.page   keys and values of a page
    DIR/zinc-rt-kv/SCOPE/NAME.state  the recurrent state after a page

Several processes may use one folder. A file becomes visible by renaming, and its bytes depend on
its name alone, so two that write one file write the same. Only files of these names are removed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from contract import cached_files
from contract.arrays import Bytes
from reference.memory.disk.entry import HEADER_BYTES, Entry, encode_entry
from reference.memory.disk.names import SECRET_BYTES, PageNames

SUBFOLDER = "zinc-rt-kv"
SECRET = "secret"
_SCOPE = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{64}\.(page|state)(\.[0-9a-f]{16}\.partial)?")
SPARE = 16
"""One part in this many of the limit is freed when the folder is full, because finding the least
recently used files takes time in proportion to all files."""
REMOVALS = 16
"""A file is written again as often as this if its scope is removed meanwhile."""


class CacheFolder:
    """The cache's files below ``folder``, of at most ``max_bytes`` in all.

    Creates the folder and its secret, of ``fresh`` bytes, if they do not exist. Raises OSError if
    that fails. One thread calls the methods that write."""

    def __init__(self, folder: Path, max_bytes: int, fresh: bytes | None = None) -> None:
        self.path = folder / SUBFOLDER
        self.max_bytes = max_bytes
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._device = self.path.stat().st_dev
        cached_files.remove_abandoned(self.path, f"{SECRET}.")
        self.secret = secret_in(self.path / SECRET, fresh)
        self.nbytes: int | None = None
        """Bytes of all files when they were last counted and what this process wrote since; None
        before."""
        self._written = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether the folder, if it was made again, would lie on another file system: its own is
        not mounted."""
        there = next(parent for parent in self.path.parents if parent.exists())
        return there.stat().st_dev != self._device

    def has(self, entry: Entry) -> bool:
        """Whether there is a file of this name, valid or not."""
        return os.path.exists(os.path.join(self.path, entry.path))

    def write(self, entry: Entry, payload: Bytes) -> bool:
        """Write a file unless it exists; False if it does, or exceeds the limit. Raises OSError."""
        size = HEADER_BYTES + entry.nbytes
        target = self.path / entry.path
        if size > self.max_bytes or target.exists():
            return False
        self._make_room(size)
        parts = encode_entry(entry, payload, self.secret)
        for _ in range(REMOVALS):
            # Somebody who removes the scope may take its folder, or the file before it has a name.
            with contextlib.suppress(FileNotFoundError):
                _write_file(target, parts)
                break
        else:
            _write_file(target, parts)
        self.nbytes = (self.nbytes or 0) + size
        self._written += size
        return True

    def touch(self, entries: Iterable[Entry], now: int) -> None:
        """Record that files were used at ``now``, in nanoseconds, the first as the least recent
        one. Missing files are ignored."""
        for used, entry in enumerate(entries, now):
            with contextlib.suppress(OSError):
                os.utime(self.path / entry.path, ns=(used, used))

    def remove(self, entry: Entry) -> None:
        """Remove a file. Raises OSError if that fails."""
        (self.path / entry.path).unlink(missing_ok=True)

    def remove_scope(self, scope: str) -> None:
        """Remove all files of a scope. Raises OSError if one remains."""
        folder = self.path / scope
        for file in _files_in(folder):
            file.path.unlink(missing_ok=True)
        self.nbytes = None
        # Another process may write there at this moment.
        with contextlib.suppress(OSError):
            folder.rmdir()

    def count(self) -> list[cached_files.CachedFile]:
        """Count the bytes of all files, and return the files. Removes partial files of processes
        that were killed."""
        found = []
        for file in self.files():
            if file.path.suffix == cached_files.PARTIAL and cached_files.abandoned(
                file.path, file.used
            ):
                file.path.unlink(missing_ok=True)
            else:
                found.append(file)
        self.nbytes, self._written = sum(file.nbytes for file in found), 0
        return found

    def files(self) -> list[cached_files.CachedFile]:
        """All files of the cache, those of other processes too."""
        found: list[cached_files.CachedFile] = []
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                if _SCOPE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    found += _files_in(Path(entry.path))
        return found

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently used files if ``nbytes`` more exceed the limit. Files of other
        processes are counted again each time a part of the limit was written."""
        known = self.nbytes is not None and self._written < self.max_bytes // SPARE
        if known and (self.nbytes or 0) + nbytes <= self.max_bytes:
            return
        found = self.count()
        if (self.nbytes or 0) + nbytes > self.max_bytes:
            spared = self.max_bytes // SPARE
            for file in cached_files.least_used(found, max(0, self.max_bytes - spared - nbytes)):
                file.path.unlink(missing_ok=True)
            self.count()


def forget_scope(folder: Path, scope: Sequence[str | int]) -> None:
    """Remove a scope's files below ``folder``, of any model. Raises OSError if one remains."""
    if (folder / SUBFOLDER).is_dir():
        cache = CacheFolder(folder, 0)
        cache.remove_scope(PageNames(cache.secret, "").scope(scope))


def _files_in(folder: Path) -> Iterator[cached_files.CachedFile]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not _FILE.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                yield cached_files.CachedFile(Path(entry.path), status.st_size, status.st_mtime_ns)


def _write_file(target: Path, parts: Sequence[bytes | memoryview]) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True)
    partial = cached_files.partial_name(target)
    with cached_files.partial_file(partial) as file:
        for part in parts:
            _write_all(file.fileno(), part)
        file.close()
        os.replace(partial, target)


def _write_all(handle: int, part: bytes | memoryview) -> None:
    view = memoryview(part).cast("B")
    while view:
        view = view[os.write(handle, view) :]


def secret_in(path: Path, fresh: bytes | None = None) -> bytes:
    """The secret in a file; the first process creates it, ``fresh`` or random. Raises OSError."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            found = path.read_bytes()
            if len(found) == SECRET_BYTES:
                return found
            # A crash cut it: files written with it can no longer be checked.
            path.unlink(missing_ok=True)
        partial = cached_files.partial_name(path)
        with cached_files.partial_file(partial) as file:
            _write_all(file.fileno(), fresh or os.urandom(SECRET_BYTES))
            os.fsync(file.fileno())
            # Of several processes that make one, the first wins.
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
    return path.read_bytes()
