"""The files of a cache folder: which to evict, and which partial files were abandoned."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PARTIAL = ".partial"
"""Suffix of a file that is being written; it is renamed once it is complete."""
RANDOM_NAME = "[0-9a-f]{16}"
"""The part of the name before that suffix, in a folder that users name."""
LONGEST_NAME = 255 - len(f"..{'0' * 16}{PARTIAL}")
"""Most bytes of a name that a partial file's name can be made from."""
ABANDONED_SECONDS = 3600.0
"""Seconds without a change after which a partial file without a writer is removed."""


def need_file(path: Path) -> None:
    """Raise OSError if ``path`` exists and is not a regular file: renaming a file to it would
    replace, for example, a device."""
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "is no file")


DAY = 86_400 * 10**9
"""Nanoseconds by which the clocks of machines that share a folder may differ."""


class CachedFile(NamedTuple):
    """A file of a cache: its bytes, and when it was used last, in nanoseconds."""

    path: Path
    nbytes: int
    used: int


def least_used(
    files: Iterable[CachedFile], max_bytes: int, max_files: int | None = None
) -> list[CachedFile]:
    """The files to remove, least recently used first, so that at most ``max_bytes`` bytes and
    ``max_files`` files remain; None is any number of files. Files of the future, from a time when
    the clock was wrong, go first: they would stay for ever, and new ones would go."""
    latest = time.time_ns() + DAY
    left = sorted(files, key=lambda file: file.used if file.used <= latest else 0)
    total, count = sum(file.nbytes for file in left), len(left)
    removed = []
    for file in left:
        if total <= max_bytes and (max_files is None or count <= max_files):
            break
        removed.append(file)
        total, count = total - file.nbytes, count - 1
    return removed


@contextlib.contextmanager
def being_written(path: Path | str) -> Iterator[None]:
    """A context in which the partial file ``path`` is locked as being written, so that other
    processes leave it alone whatever their clocks say. The file is renamed inside the context. If
    the system or the disk has no such locks, the age of the file alone decides. Raises OSError if
    the file does not exist."""
    fcntl = _locks()
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def partial_name(path: Path) -> Path:
    """A new name beside ``path`` for a file that is renamed to it."""
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}{PARTIAL}")


@contextlib.contextmanager
def partial_file(partial: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Create the file ``partial``, which the block closes and renames once it is complete: see
    ``being_written``. Otherwise the file is removed. Raises OSError, also if it exists."""
    with open(partial, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        try:
            with being_written(partial):
                yield file
        finally:
            with contextlib.suppress(OSError):
                os.unlink(partial)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that is renamed to ``path`` at the end of the block. After an exception the
    new file is removed, and ``path`` is as before. Readers never see a file half written.

    The permissions are ``mode`` less the umask. With ``sync`` the bytes are on the disk before the
    file is renamed. Raises OSError, also if ``path`` is a folder or a device."""
    need_file(path)
    remove_abandoned(path.parent, f".{path.name}.")
    partial = partial_name(path.with_name(f".{path.name}"))
    with partial_file(partial, mode) as file:
        yield file
        file.flush()
        if sync:
            os.fsync(file.fileno())
        file.close()
        os.replace(partial, path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for what belongs into a file that a user named. As ``replacing``, but a link and
    the permissions stay. A pipe, a device, and a file beside which there can be no other, are
    written themselves. Raises OSError."""
    if _has_no_successor(path):
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve()
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666
    with replacing(target, mode) as file:
        yield file


def _has_no_successor(path: Path) -> bool:
    """Whether no other file can be renamed to ``path``, or would not be what it is."""
    of_system = path.absolute().parts[1:2] in (("dev",), ("proc",))
    other = path.exists() and not path.is_file()
    target = path.resolve()
    too_long = len(os.fsencode(target.name)) > LONGEST_NAME
    return of_system or other or too_long or not os.access(target.parent, os.W_OK)


def unfinished(path: Path) -> list[Path]:
    """The files that ``replacing`` began for ``path`` and that have not been renamed."""
    name = re.compile(re.escape(f".{path.name}.") + RANDOM_NAME + re.escape(PARTIAL))
    return [other for other in path.parent.iterdir() if name.fullmatch(other.name)]


def has_writer(path: Path | str) -> bool:
    """Whether a process is writing the file. Also True if the file may not be opened, since then
    nobody can tell."""
    fcntl = _locks()
    if fcntl is None:
        return False
    try:
        handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EPERM)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(handle)


def _locks() -> Any:
    """The module of file locks; None on Windows, where an open file cannot be removed."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def abandoned(path: Path | str, used: int) -> bool:
    """Whether a partial file last changed at ``used``, in nanoseconds, has no writer any more. The
    time may come from another machine's clock, so the lock decides as well."""
    return time.time() - used / 1e9 > ABANDONED_SECONDS and not has_writer(path)


def remove_abandoned(folder: Path, prefix: str | None = None, suffix: str = PARTIAL) -> None:
    """Remove partial files whose writers were killed. In a folder of the program itself these are
    all files with ``suffix``; in a folder that users name, those named ``prefix`` and RANDOM_NAME
    before it. A writer that is alive after all cannot rename its file, which is an OSError as on a
    full disk."""
    random = re.compile(re.escape(prefix or "") + RANDOM_NAME + re.escape(suffix))
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            ours = entry.name.endswith(suffix) if prefix is None else random.fullmatch(entry.name)
            if ours:
                with contextlib.suppress(OSError):
                    if abandoned(entry.path, entry.stat(follow_symlinks=False).st_mtime_ns):
                        os.unlink(entry.path)
