"""The catalog's own data: every entry is complete, pinned and safe to turn into a path."""

from __future__ import annotations

import re

import pytest

from contract.errors import CatalogError
from harness.catalog import DEFAULT_ID, ENTRIES, CatalogEntry, HttpsSource, WheelMember, find
from harness.catalog.https import Network, checked_url
from harness.catalog.store import checked_file_name, checked_id


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_entry_is_complete(entry: CatalogEntry) -> None:
    """An entry names exact bytes at an address the downloader accepts."""
    assert checked_id(entry.id) == entry.id
    assert checked_file_name(entry.file_name).endswith(".gguf")
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.memory > entry.size > 0
    if isinstance(entry.source, HttpsSource):
        parts = checked_url(entry.source.url, Network())
        assert re.search(r"/resolve/[0-9a-f]{40}/", parts.path), "the revision is pinned"


def test_digests_and_files_are_distinct() -> None:
    assert len({entry.sha256 for entry in ENTRIES.values()}) == len(ENTRIES)
    assert len({entry.file_name for entry in ENTRIES.values()}) == len(ENTRIES)


def test_default_entry_comes_from_the_package_index() -> None:
    entry = find(DEFAULT_ID)
    assert isinstance(entry.source, WheelMember)
    assert entry.licence == "Apache-2.0"
    assert entry.size == 98_362_432


@pytest.mark.parametrize(
    ("wanted", "offered"), [("qwen3-8", "qwen3-8b"), ("SMOLLM2-135m", DEFAULT_ID)]
)
def test_unknown_id_names_the_nearest(wanted: str, offered: str) -> None:
    with pytest.raises(CatalogError, match=f"did you mean .*{offered}"):
        find(wanted)


def test_unknown_id_without_neighbours_names_the_listing() -> None:
    with pytest.raises(CatalogError, match="zinc-rt model list"):
        find("zzzzzz")
