"""Facts about managed models, as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.catalog import store
from harness.catalog.entries import ENTRIES, CatalogEntry
from harness.catalog.store import PulledModel

Facts = dict[str, Any]


def managed_models(cache_dir: Path) -> Iterator[Facts]:
    """The facts of all catalogued models, then of the pulled hub models."""
    for entry in ENTRIES.values():
        yield entry_facts(entry, store.find_pulled(entry.id, cache_dir))
    for found in store.pulled_from_hub(cache_dir):
        yield hub_facts(found.id, found)


def entry_facts(entry: CatalogEntry, found: PulledModel | None) -> Facts:
    """Facts of a catalogued model; sizes are in bytes, ``path`` is null unless it is installed."""
    return {
        "id": entry.id,
        "name": entry.name,
        "architecture": entry.architecture,
        "parameters": entry.parameters,
        "quant": entry.quant,
        "licence": entry.licence,
        "size_bytes": entry.file.size,
        "memory_bytes": entry.memory,
        "sha256": entry.file.sha256,
        "source": str(entry.file.source),
        "installed": found is not None,
        "path": str(found.path) if found else None,
    }


def file_facts(path: Path) -> Facts:
    """Facts of a model file of the user's own."""
    present = path.is_file()
    return {
        "id": str(path),
        "size_bytes": path.stat().st_size if present else None,
        "source": "file",
        "installed": present,
        "path": str(path) if present else None,
    }


def hub_facts(name: str, found: PulledModel | None) -> Facts:
    """Facts of a hub model, as far as the cache knows them."""
    return {
        "id": name,
        "size_bytes": found.size if found else None,
        "source": name,
        "installed": found is not None,
        "path": str(found.path) if found else None,
    }
