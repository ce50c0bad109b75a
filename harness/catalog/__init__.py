"""Managed models: from the catalog or from the hub, verified, in their own folder."""

from harness.catalog.entries import (
    DEFAULT_ID,
    ENTRIES,
    MEMORY_CONTEXT_TOKENS,
    MEMORY_OVERHEAD_BYTES,
    CatalogEntry,
    HubFile,
    ManagedModel,
    ModelFile,
    WheelMember,
    entry_of_file,
    find,
)
from harness.catalog.facts import entry_facts, file_facts, hub_facts, managed_models
from harness.catalog.names import is_hub_name, pasted_name
from harness.catalog.pull import existing_file, find_model, pull, resolve_model
from harness.catalog.store import (
    PulledModel,
    active,
    find_pulled,
    known_name,
    model_path,
    pulled_from_hub,
    remove,
    set_active,
)

__all__ = [
    "DEFAULT_ID",
    "ENTRIES",
    "MEMORY_CONTEXT_TOKENS",
    "MEMORY_OVERHEAD_BYTES",
    "CatalogEntry",
    "HubFile",
    "ManagedModel",
    "ModelFile",
    "PulledModel",
    "WheelMember",
    "active",
    "entry_facts",
    "entry_of_file",
    "existing_file",
    "file_facts",
    "find",
    "find_model",
    "find_pulled",
    "hub_facts",
    "is_hub_name",
    "known_name",
    "managed_models",
    "model_path",
    "pasted_name",
    "pull",
    "pulled_from_hub",
    "remove",
    "resolve_model",
    "set_active",
]
