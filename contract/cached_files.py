"""The files of a cache folder: which of them make room, and which nobody will complete."""

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
"""Ends the name of a file that is being written, and gets its own name once it is complete."""
RANDOM_NAME = "[0-9a-f]{16}"
"""What such a name has in front of its end, in a folder that users name."""
ABANDONED_SECONDS = 3600.0
"""Seconds without a change after which such a file that has no writer is removed."""


def need_file(path: Path) -> None:
    """Raise OSError if ``path`` is there and is no file: a file renamed to it would take the
    place of a device."""
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "is no file")


class CachedFile(NamedTuple):
    """A file of a cache: its bytes, and when it was used last, in nanoseconds."""

    path: Path
    nbytes: int
    used: int


def least_used(
    files: Iterable[CachedFile], most_bytes: int, most_files: int | None = None
) -> list[CachedFile]:
    """The files to remove, least recently used first, so that at most ``most_bytes`` bytes and
    ``most_files`` files stay; None is any number of files."""
    left = sorted(files, key=lambda file: file.used)
    total, count = sum(file.nbytes for file in left), len(left)
    removed = []
    for file in left:
        if total <= most_bytes and (most_files is None or count <= most_files):
            break
        removed.append(file)
        total, count = total - file.nbytes, count - 1
    return removed


@contextlib.contextmanager
def being_written(path: Path | str) -> Iterator[None]:
    """Says of a partial file, until the block ends, that it has a writer: other processes leave it
    alone whatever their clocks say. The block also renames it. Where the system or the disk has no
    such locks, its age alone decides. Raises OSError for a file that is not there."""
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


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that is renamed to ``path`` at the end of the block. After an exception the
    new file is removed, and ``path`` is as before. Readers never see a file half written.

    The permissions are ``mode`` less the umask. With ``sync`` the bytes are on the disk before the
    file is renamed. Raises OSError, also if ``path`` is a folder or a device."""
    need_file(path)
    remove_abandoned(path.parent, f".{path.name}.")
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}{PARTIAL}")
    try:
        with (
            open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
            being_written(partial),
        ):
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            file.close()
            os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def unfinished(path: Path) -> list[Path]:
    """The files that ``replacing`` began for ``path`` and that have not been renamed."""
    name = re.compile(re.escape(f".{path.name}.") + RANDOM_NAME + re.escape(PARTIAL))
    return [other for other in path.parent.iterdir() if name.fullmatch(other.name)]


def has_writer(path: Path | str) -> bool:
    """Whether a process says that it writes a file, or it may not be opened, so nobody can tell."""
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
    """The module of locks on files; None on Windows, where a file that is open stays."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def abandoned(path: Path | str, used: int) -> bool:
    """Whether a partial file last changed at ``used``, in nanoseconds, has no writer any more: the
    clock that set the time may be another one."""
    return time.time() - used / 1e9 > ABANDONED_SECONDS and not has_writer(path)


def remove_abandoned(folder: Path, prefix: str | None = None, suffix: str = PARTIAL) -> None:
    """Remove files of a folder whose writers were killed. In a folder of the program's own these
    are all with the suffix; in one that users name, where others write too, those with ``prefix``
    and RANDOM_NAME in front of it. A writer that lives in spite of it cannot rename its file, which
    is an OSError as on a full disk."""
    random = re.compile(re.escape(prefix or "") + RANDOM_NAME + re.escape(suffix))
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            ours = entry.name.endswith(suffix) if prefix is None else random.fullmatch(entry.name)
            if ours:
                with contextlib.suppress(OSError):
                    if abandoned(entry.path, entry.stat(follow_symlinks=False).st_mtime_ns):
                        os.unlink(entry.path)
