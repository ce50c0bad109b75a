"""Managed models: a catalog of verified files and the cache folder they are pulled into."""

from harness.catalog.entries import (
    DEFAULT_ID,
    ENTRIES,
    CatalogEntry,
    HttpsSource,
    WheelMember,
    find,
)
from harness.catalog.https import Network
from harness.catalog.pull import pull, resolve_model
from harness.catalog.store import active, installed, is_installed, model_path, remove, set_active

__all__ = [
    "DEFAULT_ID",
    "ENTRIES",
    "CatalogEntry",
    "HttpsSource",
    "Network",
    "WheelMember",
    "active",
    "find",
    "installed",
    "is_installed",
    "model_path",
    "pull",
    "remove",
    "resolve_model",
    "set_active",
]
