"""Kernels that were compiled ahead of time: files of a folder, or in a wheel one archive of them.

The files are alike, so an archive takes a twentieth of their size. It is read as a whole when the
first of its kernels is needed, which only a machine with such a device does."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".zrt"
ARCHIVE_SUFFIX = ".tar.xz"
FOLDERS = ("amd/modules", "amd/modules_gfx1100", "vulkan/modules")
"""Folders of compiled kernels, relative to this package's parent."""
BUILDERS = {"amd": "accel.amd.tools.build", "vulkan": "accel.vulkan.build"}
"""What makes the kernels of a tier, by the folder of its package."""


def read_compiled(folder: Path, name: str) -> bytes:
    """The kernel file ``name`` of a folder, from the folder or from its archive. Raises
    FileNotFoundError if neither has it, and OSError for a damaged archive."""
    path = folder / f"{name}{SUFFIX}"
    archive = archive_of(folder)
    if path.is_file():
        return path.read_bytes()
    if not archive.is_file():
        raise FileNotFoundError(f"{path} is not there; {_remedy(folder)}")
    try:
        return _contents(archive)[path.name]
    except KeyError:
        raise FileNotFoundError(f"{archive}: has no {path.name}") from None


def has_compiled(folder: Path, name: str) -> bool:
    """Whether a folder or its archive has the kernel file ``name``. Raises OSError for a damaged
    archive."""
    path = folder / f"{name}{SUFFIX}"
    archive = archive_of(folder)
    return path.is_file() or (archive.is_file() and path.name in _contents(archive))


def archive_of(folder: Path) -> Path:
    """The archive that holds the kernel files of a folder in a wheel."""
    return folder.with_name(f"{folder.name}{ARCHIVE_SUFFIX}")


def _remedy(folder: Path) -> str:
    builder = BUILDERS.get(folder.parent.name)
    return f"a checkout makes it by `python -m {builder}`" if builder else "nothing makes it"


@functools.cache
def _contents(archive: Path) -> Mapping[str, bytes]:
    try:
        with tarfile.open(archive, "r:xz") as opened:
            return {member.name: _data(opened, member) for member in opened}
    except (tarfile.TarError, EOFError) as error:
        raise OSError(f"{archive}: is damaged: {error}") from None


def _data(opened: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = opened.extractfile(member)
    if file is None:
        raise tarfile.TarError(f"{member.name} is no file")
    return file.read()


@contextmanager
def archives(accel: Path) -> Iterator[None]:
    """The archive of every folder of compiled kernels in the package ``accel``, removed at the end.
    The same files give the same bytes."""
    made = []
    try:
        for name in FOLDERS:
            target = archive_of(accel / name)
            made.append(target)
            _pack(accel / name, target)
        yield
    finally:
        for target in made:
            target.unlink(missing_ok=True)


def _pack(folder: Path, target: Path) -> None:
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            member = tarfile.TarInfo(path.name)
            data = path.read_bytes()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
