"""Files that commands write: what cannot be written, or is somebody's, is refused first."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from contract.errors import ConfigError

SYNTHETIC = (b"zinc_rt.synth.", b"EAGLE-3 head of ", b"DFlash head of ")
"""One of these in the first METADATA_BYTES of a file says that its weights are random."""
METADATA_BYTES = 4096


def check_output(flag: str, path: Path, *read: Path | None) -> None:
    """Raise ConfigError before anything is computed where no file can be written to ``path``, or it
    is a model or one of the files that are ``read``, which would be lost."""
    check_writable(flag, path, *read)
    from reference.model.gguf.header import MAGIC

    if _begin(path, len(MAGIC)) == MAGIC:
        raise ConfigError(f"{flag}: {path} is a model; name another file")


def check_writable(flag: str, path: Path, *read: Path | None) -> None:
    """Raise ConfigError where no file can be written to ``path``, or it is one of the files that
    are ``read``. A model may be replaced."""
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise ConfigError(f"{flag}: {path} cannot be written: {path.parent} is not a folder")
    if os.path.isdir(path):
        raise ConfigError(f"{flag}: {path} is a folder; name a file in it")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{flag}: {path} may not be written")
    if any(file is not None and _is_same(path, file) for file in read):
        raise ConfigError(f"{flag}: {path} is read or written, too; name another file")


def check_synthetic(flag: str, path: Path, *read: Path | None) -> None:
    """Raise ConfigError where a random model cannot be written to ``path``, or would replace a file
    that is no random model."""
    check_writable(flag, path, *read)
    begin = _begin(path, METADATA_BYTES)
    if begin and not any(mark in begin for mark in SYNTHETIC):
        raise ConfigError(f"{flag}: {path} is there and no random model; name another file")


def check_own(flag: str, path: Path, magic: bytes) -> None:
    """Raise ConfigError where a file of a format of ours, which begins with ``magic``, would
    replace another."""
    check_writable(flag, path)
    if _begin(path, len(magic)) not in (b"", magic):
        raise ConfigError(f"{flag}: {path} is there and not of that kind; name another file")


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()


def _begin(path: Path, count: int) -> bytes:
    """The first bytes of a file, none where there is none."""
    with suppress(OSError):
        if os.path.isfile(path):
            with path.open("rb") as file:
                return file.read(count)
    return b""
