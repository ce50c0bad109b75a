"""The catalog's own data: every entry is complete, pinned and safe to turn into a path."""

import re

import pytest

from contract.errors import CatalogError
from harness.catalog import DEFAULT_ID, ENTRIES, HubFile, WheelMember, find
from harness.catalog.names import parse_hub_name
from harness.catalog.store import checked_path
from harness.sampling_defaults import sampling_defaults
from harness.settings_table import SETTINGS


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_entry_is_complete(entry):
    """An entry names exact bytes: a file of a pinned commit, or a member of a pinned wheel."""
    source = entry.file.source
    assert checked_path(entry.folder) == entry.id
    assert checked_path(source.path).endswith(".gguf")
    assert re.fullmatch(r"[0-9a-f]{64}", entry.file.sha256)
    assert entry.memory > entry.file.size > 0
    if isinstance(source, HubFile):
        assert parse_hub_name(f"hf.co/{source.repository}/{source.path}").path == source.path
        assert re.fullmatch(r"[0-9a-f]{40}", source.revision), "the revision is pinned"


def test_digests_and_files_are_distinct():
    assert len({entry.file.sha256 for entry in ENTRIES.values()}) == len(ENTRIES)
    assert len({entry.file.source.path for entry in ENTRIES.values()}) == len(ENTRIES)


def test_default_entry_comes_from_the_package_index():
    entry = find(DEFAULT_ID)
    assert isinstance(entry.file.source, WheelMember)
    assert entry.licence == "Apache-2.0"
    assert entry.file.size == 98_362_432


def test_a_server_answers_for_the_default_model_as_run_does():
    """A newcomer asks both the same question."""
    served = sampling_defaults({}, dict(find(DEFAULT_ID).sampling))
    assert served.temperature == SETTINGS["temperature"].default == 0


@pytest.mark.parametrize(
    ("requested", "offered"), [("qwen3-8", "qwen3-8b"), ("SMOLLM2-135m", DEFAULT_ID)]
)
def test_unknown_id_names_the_nearest(requested, offered):
    with pytest.raises(CatalogError, match=f"did you mean .*{offered}"):
        find(requested)


def test_unknown_id_without_neighbours_names_the_listing():
    with pytest.raises(CatalogError, match="zinc-rt model list"):
        find("zzzzzz")
