"""The folder of pulled models: names, layout, locks, contents and the active model.

    <cache>/models/<id>/<path>                  the files of a catalogued model
    <cache>/models/hf.co/ORG/REPO/<name>/<path> those of a hub model
    <cache>/partial/<name>/                     a pull in progress, not yet visible
    <cache>/locks/<name>.lock                   held while that model is pulled or removed
    <cache>/active                              the name chosen with ``zinc-rt model use``

A folder below ``models`` is a complete, verified model and appears at once. Names are checked
against a small alphabet before they become paths, and each folder is checked to be inside the
cache."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from contract.cached_files import replacing
from contract.errors import CatalogError, system_errors_as
from contract.lazy_dataclass import dataclass
from harness.arranged_weights import remove_arranged
from harness.catalog import names
from harness.catalog.entries import ManagedModel, find
from harness.catalog.hub import hub_folder
from harness.catalog.names import WORD, HubName, is_hub_name, parse_hub_name, quant_of
from harness.progress import Progress

ACTIVE_BYTES_MAX = 1 << 14


def checked_path(path: str) -> str:
    """``path`` unchanged; raises CatalogError unless it stays inside any folder it is appended
    to."""
    if not re.fullmatch(rf"{WORD}(?:/{WORD})*", path):
        raise CatalogError(f"{path!r} is not an acceptable path: use A-Z, a-z, 0-9, '.', '_', '-'")
    return path


def model_folder(folder: str, cache_dir: Path) -> Path:
    """The folder of a model in the cache, or in another place to which the user linked ``models``;
    raises CatalogError if a link inside leads elsewhere."""
    models = cache_dir / "models"
    path = models / checked_path(folder)
    if path.resolve() != models.resolve() / folder:
        raise CatalogError(f"{path}: leads outside the cache folder; remove that link")
    return path


def model_path(model: ManagedModel, cache_dir: Path) -> Path:
    """The path at which the first file of ``model`` is once it is pulled."""
    return model_folder(model.folder, cache_dir) / checked_path(model.files[0].source.path)


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model in the cache: its name, its folder, and the files of its parts in order."""

    id: str
    folder: str
    parts: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The file of its first part."""
        return self.parts[0]

    @property
    def size(self) -> int:
        """The bytes of all its parts."""
        return sum(part.stat().st_size for part in self.parts)


def pulled_from_hub(cache_dir: Path) -> list[PulledModel]:
    """The pulled hub models, each under its shortest name."""
    found = []
    for folder in sorted((cache_dir / "models" / "hf.co").glob("*/*")):
        repository = f"{folder.parent.name}/{folder.name}"
        paths = _hub_paths(repository, cache_dir)
        models = names.models_among(paths)
        quants = [quant_of(stem) for stem in models]
        for stem, parts in models.items():
            quant = quant_of(stem)
            short = quant != stem and quants.count(quant) == 1
            name = HubName(repository, quant) if short else HubName(repository, None, parts[0])
            files = tuple(map(paths.__getitem__, parts))
            found.append(PulledModel(str(name), hub_folder(repository, stem), files))
    return found


def find_pulled(spec: str, cache_dir: Path) -> PulledModel | None:
    """The pulled model that a catalog id or a name of the hub means, None if there is none. Raises
    CatalogError for any other text."""
    if not is_hub_name(spec):
        entry = find(spec)
        path = model_path(entry, cache_dir)
        return PulledModel(spec, entry.folder, (path,)) if path.is_file() else None
    name = parse_hub_name(spec)
    paths = _hub_paths(name.repository, cache_dir)
    with contextlib.suppress(CatalogError):
        stem, parts = names.choose(name, paths)
        files = tuple(map(paths.__getitem__, parts))
        return PulledModel(spec, hub_folder(name.repository, stem), files)
    return None


def _hub_paths(repository: str, cache_dir: Path) -> dict[str, Path]:
    """The pulled files of ``repository``, by their path in it; files that another program put
    there belong to no model."""
    folder, found = model_folder(f"hf.co/{repository}", cache_dir), {}
    for model in folder.glob("*"):
        for path in model.rglob("*.gguf"):
            own = path.relative_to(model).as_posix()
            if hub_folder(repository, names.stem_of(own)) == f"hf.co/{repository}/{model.name}":
                found[own] = path
    return found


@contextlib.contextmanager
def locked(name: str, cache_dir: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of the model folder ``name``; waits for another process that holds it."""
    from filelock import FileLock, Timeout

    path = cache_dir / "locks" / f"{checked_path(name).replace('/', '--')}.lock"
    lock = FileLock(path)
    with system_errors_as(f"{path}: cannot lock", CatalogError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            progress.start(f"waiting for another process busy with {name}", None, "B")
            lock.acquire()
            progress.close()
    try:
        yield
    finally:
        lock.release()


def remove(spec: str, cache_dir: Path, progress: Progress) -> int:
    """Delete a pulled model and what tiers stored of it, clear it as the active one, and return the
    bytes freed. What others put into its folder stays. Raises CatalogError if the model is not in
    the cache."""
    found = find_pulled(spec, cache_dir)
    if found is None:
        raise CatalogError(f"{spec} is not in {cache_dir}: nothing to remove")
    with locked(found.folder, cache_dir, progress):
        path = model_folder(found.folder, cache_dir)
        try:
            freed = found.size + remove_arranged(found.parts)
            # Without its first part there is no model, so that goes last.
            for part in reversed(found.parts):
                part.unlink()
                for folder in part.parents[: len(part.parents) - len(path.parents)]:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
        except OSError as error:
            raise CatalogError(f"{error.filename}: cannot remove: {error.strerror}") from None
    if active(cache_dir) == spec:
        (cache_dir / "active").unlink(missing_ok=True)
    return freed


def active(cache_dir: Path) -> str | None:
    """The name or the path chosen with ``set_active``, or None; the model need not be there. Raises
    CatalogError for a file that ``set_active`` did not write."""
    path = cache_dir / "active"
    try:
        with path.open("rb") as file:
            content = file.read(ACTIVE_BYTES_MAX).decode("utf-8", "replace").rstrip("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CatalogError(f"{path}: cannot read: {error.strerror}") from None
    if os.path.isabs(content) and content.isprintable():
        return content
    try:
        known_name(content)
    except CatalogError:
        raise CatalogError(
            f"{path}: holds {content[:80]!r}, not a model's name; run `zinc-rt model use`"
        ) from None
    return content


def set_active(spec: str, cache_dir: Path) -> None:
    """Make ``spec`` the model used when none is named: a catalog id, a name of the hub, or the
    absolute path of a file."""
    if not os.path.isabs(spec):
        known_name(spec)
    elif not spec.isprintable():
        raise CatalogError(f"{spec!r}: a path with control characters cannot be chosen")
    path = cache_dir / "active"
    with system_errors_as(f"{path}: cannot write", CatalogError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(f"{spec}\n".encode())


def known_name(spec: str) -> str:
    """The canonical form of ``spec``; raises CatalogError unless it is a catalog id or a name of
    the hub."""
    return str(parse_hub_name(spec)) if is_hub_name(spec) else find(spec).id
