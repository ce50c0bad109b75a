"""The folder of pulled models: names, layout, locks, what is there and what is active.

    <cache>/models/<id>/<file name>      a whole file of the catalogued digest, and nothing else
    <cache>/models/<id>/.partial-<pid>/  a pull under way; visible to nobody
    <cache>/locks/<id>.lock              held while that model is pulled or removed
    <cache>/active                       the id chosen with ``zinc-rt model use``

Names are checked against a short alphabet before they become paths, and the model's folder is
checked to really lie inside the cache, so no catalog entry or link can write elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from contract.errors import CatalogError
from harness.catalog.entries import ENTRIES, CatalogEntry, find
from harness.progress import Progress

ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
FILE_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
PARTIAL_PREFIX = ".partial-"


def checked_id(model_id: str) -> str:
    """``model_id`` unchanged; raises CatalogError unless it is safe as a folder name."""
    if not ID_PATTERN.fullmatch(model_id):
        raise CatalogError(f"{model_id!r} is not a model id: use a-z, 0-9, '.', '_' and '-' only")
    return model_id


def checked_file_name(name: str) -> str:
    """``name`` unchanged; raises CatalogError unless it is safe as a file name."""
    if not FILE_PATTERN.fullmatch(name):
        raise CatalogError(f"{name!r} is not an acceptable file name")
    return name


def model_path(entry: CatalogEntry, cache_dir: Path) -> Path:
    """Where the file of ``entry`` is, once pulled."""
    return cache_dir / "models" / checked_id(entry.id) / checked_file_name(entry.file_name)


def is_installed(entry: CatalogEntry, cache_dir: Path) -> bool:
    """Whether the file is there at its full size. Its digest was checked when it was pulled."""
    path = model_path(entry, cache_dir)
    return path.is_file() and path.stat().st_size == entry.size


def installed(cache_dir: Path) -> dict[str, Path]:
    """The pulled models: id to file."""
    return {
        entry.id: model_path(entry, cache_dir)
        for entry in ENTRIES.values()
        if is_installed(entry, cache_dir)
    }


def prepared_folder(entry: CatalogEntry, cache_dir: Path) -> Path:
    """The model's folder, made if need be; raises CatalogError if a link leads it elsewhere."""
    folder = model_path(entry, cache_dir).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CatalogError(f"{folder}: cannot create: {error.strerror}") from None
    if folder.resolve() != cache_dir.resolve() / "models" / entry.id:
        raise CatalogError(f"{folder}: leads outside the cache folder; remove that link")
    return folder


@contextlib.contextmanager
def locked(model_id: str, cache_dir: Path, progress: Progress) -> Iterator[int]:
    """Hold the model's lock, waiting for another process that has it; gives its descriptor.

    The system frees the lock when the last process with the descriptor is gone, however it went:
    a child that writes into the model's folder must inherit it.
    """
    folder = cache_dir / "locks"
    path = folder / f"{checked_id(model_id)}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CatalogError(f"{path}: cannot create: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.start(f"waiting for another process busy with {model_id}", None, "B")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            progress.close()
        yield descriptor
    finally:
        os.close(descriptor)


def remove_partials(folder: Path) -> None:
    """Delete what dead pulls left in ``folder``. Only the holder of the lock may call this."""
    for path in folder.glob(f"{PARTIAL_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove(model_id: str, cache_dir: Path, progress: Progress) -> int:
    """Delete a pulled model and forget it as the active one; gives the bytes freed.

    Raises CatalogError if the model is not in the cache.
    """
    entry = find(model_id)
    path = model_path(entry, cache_dir)
    if not path.is_file():
        raise CatalogError(f"{model_id} is not in {cache_dir}: nothing to remove")
    was_active = active(cache_dir) == model_id
    with locked(model_id, cache_dir, progress):
        folder = prepared_folder(entry, cache_dir)
        try:
            freed = path.stat().st_size
            path.unlink()
        except OSError as error:
            raise CatalogError(f"{path}: cannot remove: {error.strerror}") from None
        remove_partials(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()
        if was_active:
            (cache_dir / "active").unlink(missing_ok=True)
    return freed


def active(cache_dir: Path) -> str | None:
    """The id chosen with ``set_active``, or None. Raises CatalogError on a file it did not write.

    The id may be of a model that is not pulled yet."""
    path = cache_dir / "active"
    try:
        with path.open("rb") as file:
            content = file.read(100).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CatalogError(f"{path}: cannot read: {error.strerror}") from None
    if content not in ENTRIES:
        raise CatalogError(f"{path}: holds {content!r}, not a catalog id; run `zinc-rt model use`")
    return content


def set_active(model_id: str, cache_dir: Path) -> None:
    """Make ``model_id`` the model used when none is named."""
    find(model_id)
    path = cache_dir / "active"
    temporary = cache_dir / f"active.{os.getpid()}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{model_id}\n", encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        raise CatalogError(f"{path}: cannot write: {error.strerror}") from None
