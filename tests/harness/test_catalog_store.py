"""The cache folder: safe names, what counts as installed, removal, the active model."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import CatalogError
from harness import catalog
from harness.catalog import (
    DEFAULT_ID,
    ENTRIES,
    HubFile,
    ManagedModel,
    ModelFile,
    PulledModel,
    find,
    find_pulled,
    model_path,
    pull,
    resolve_model,
)
from harness.catalog.store import checked_path, locked, model_folder
from harness.progress import NullProgress

PARTS = ("T-Q4_0-00001-of-00002.gguf", "T-Q4_0-00002-of-00002.gguf")
HOSTILE = [
    *("..", ".", "", "/etc", "a/../b", "a//b", "a/", "a\\b", "a\0b", "~", ".hidden", "-rf", "a b")
]


@pytest.mark.parametrize("path", [*HOSTILE, "ü", "a\n", "a/.b", "x" * 129])
def test_hostile_paths_are_refused(path):
    with pytest.raises(CatalogError, match="not an acceptable path"):
        checked_path(path)


@given(st.text(), st.text())
def test_no_name_leads_out_of_the_cache(model_id, path):
    """Whatever a model says, its file is below ``models`` or refused."""
    file = ModelFile(HubFile("a/b", "c", path), 1, "")
    try:
        found = model_path(ManagedModel("x", model_id, (file,)), Path("/cache"))
    except CatalogError:
        return
    assert found.is_relative_to("/cache/models")
    assert ".." not in found.parts
    assert "\0" not in str(found)


def test_folder_that_is_a_link_is_refused(tmp_path):
    """A link planted where a model's folder goes cannot redirect what is written."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    entry = find(DEFAULT_ID)
    cache = tmp_path / "cache"
    (cache / "models").mkdir(parents=True)
    (cache / "models" / entry.id).symlink_to(elsewhere)
    with pytest.raises(CatalogError, match="leads outside the cache"):
        pull(entry, cache)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("link", ["cache", "cache/models"])
def test_a_cache_on_another_disk_may_be_a_link(link, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "real")
    folder = model_folder(DEFAULT_ID, tmp_path / "cache")
    assert folder == tmp_path / "cache" / "models" / DEFAULT_ID


def test_unwritable_cache_is_a_catalog_error(tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with (
        pytest.raises(CatalogError, match="cannot lock"),
        locked("tiny", tmp_path / "cache", NullProgress()),
    ):
        pass


def plant(cache: Path, model_id: str = DEFAULT_ID) -> Path:
    """A sparse file of the declared size where the model's file belongs."""
    entry = find(model_id)
    path = model_path(entry, cache)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(entry.file.size)
    return path


def test_pulled_model_is_found(tmp_path):
    assert find_pulled(DEFAULT_ID, tmp_path) is None
    path = plant(tmp_path)
    assert find_pulled(DEFAULT_ID, tmp_path) == PulledModel(DEFAULT_ID, DEFAULT_ID, (path,))


def test_remove_frees_and_forgets(tmp_path):
    path = plant(tmp_path)
    catalog.set_active(DEFAULT_ID, tmp_path)
    assert catalog.remove(DEFAULT_ID, tmp_path, NullProgress()) == ENTRIES[DEFAULT_ID].file.size
    assert not path.parent.exists()
    assert catalog.active(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "folder", "parts"),
    [
        (DEFAULT_ID, DEFAULT_ID, [find(DEFAULT_ID).file.source.path]),
        ("hf.co/org/T:Q4_0", "hf.co/org/T/Q4_0--T-Q4_0", [f"Q4_0/{part}" for part in PARTS]),
    ],
)
def test_remove_keeps_what_others_put_there(tmp_path, name, folder, parts):
    """Folders go where nothing is left in them. A file of others is no model and of no size."""
    path = tmp_path / "models" / folder
    others = ["Q4_0/mine.gguf", "T-Q8_0.gguf", "notes/a.txt"]
    for file in (*parts, *others):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(b"12345")
    found = find_pulled(name, tmp_path)
    assert found == PulledModel(name, folder, tuple(path / part for part in parts))
    assert found.size == catalog.remove(name, tmp_path, NullProgress()) == 5 * len(parts)
    left = [file for file in path.rglob("*") if file.is_file()]
    assert sorted(left) == sorted(path / other for other in others)
    assert find_pulled(name, tmp_path) is None
    assert catalog.pulled_from_hub(tmp_path) == []


def test_remove_keeps_another_active_model(tmp_path):
    plant(tmp_path)
    catalog.set_active("qwen3-8b", tmp_path)
    catalog.remove(DEFAULT_ID, tmp_path, NullProgress())
    assert catalog.active(tmp_path) == "qwen3-8b"


def test_remove_refuses_what_is_not_there(tmp_path):
    with pytest.raises(CatalogError, match="nothing to remove"):
        catalog.remove(DEFAULT_ID, tmp_path, NullProgress())
    with pytest.raises(CatalogError, match="no catalog entry"):
        catalog.remove("../../etc", tmp_path, NullProgress())


def test_active_survives_and_rejects(tmp_path):
    assert catalog.active(tmp_path) is None
    catalog.set_active("qwen3-4b", tmp_path)
    catalog.set_active("qwen3-8b", tmp_path)
    assert catalog.active(tmp_path) == "qwen3-8b"
    assert [path.name for path in tmp_path.iterdir()] == ["active"]
    with pytest.raises(CatalogError, match="no catalog entry"):
        catalog.set_active("qwen3-9000b", tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense\n", b"\xff\xfe", b"x" * 5000, b"hf.co/../x"])
def test_foreign_active_file_is_named(tmp_path, content):
    (tmp_path / "active").write_bytes(content)
    with pytest.raises(CatalogError, match="not a model's name; run `zinc-rt model use`"):
        catalog.active(tmp_path)


def test_existing_file_wins(tmp_path, monkeypatch):
    """A file named like a catalog id is the file."""
    monkeypatch.chdir(tmp_path)
    Path(DEFAULT_ID).write_bytes(b"GGUF")
    assert resolve_model(DEFAULT_ID, tmp_path, pull_missing=False) == Path(DEFAULT_ID)


def test_model_named_by_id_or_left_to_the_active_one(tmp_path):
    default, other = plant(tmp_path), plant(tmp_path, "qwen3-8b")
    assert resolve_model("qwen3-8b", tmp_path, pull_missing=False) == other
    assert resolve_model(None, tmp_path, pull_missing=False) == default
    catalog.set_active("qwen3-8b", tmp_path)
    assert resolve_model(None, tmp_path, pull_missing=False) == other


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("qwen3-8", "no file or catalog entry named 'qwen3-8'; did you mean qwen3-8b"),
        ("missing.gguf", "no file or catalog entry named 'missing.gguf'"),
        ("./missing.gguf", "named './missing.gguf'; see `zinc-rt model list`"),
        ("models/missing.gguf", "named 'models/missing.gguf'; see `zinc-rt model list`"),
        ("../missing", "named '../missing'; see `zinc-rt model list`"),
        ("org/repo:Q8_0", "a repository of the hub is written hf.co/org/repo:Q8_0"),
        ("", "no file or catalog entry named ''"),
        ("a\0b", "no file or catalog entry"),
        ("~nobody-of-that-name/x", "no file or catalog entry"),
        ("x" * 5000, "File name too long"),
        ("/", "is a folder"),
        ("qwen3-8b", "not pulled yet; run `zinc-rt model pull qwen3-8b`"),
        ("hf.co/a/b:Q8_0", "not pulled yet; run `zinc-rt model pull hf.co/a/b:Q8_0`"),
        ("hf.co/a", "write hf.co/ORG/REPO,"),
    ],
)
def test_unusable_model_says_what_to_do(tmp_path, spec, message):
    with pytest.raises(CatalogError, match=message):
        resolve_model(spec, tmp_path, pull_missing=False)


def test_folders_that_cannot_be_read_are_passed_over(tmp_path, monkeypatch):
    """Processes end while /proc is looked through."""
    scandir = os.scandir

    def without_gone(folder: object) -> object:
        if "gone" in str(folder):
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return scandir(folder)  # type: ignore[call-overload]

    (tmp_path / "gone").mkdir()
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model.gguf").touch()
    monkeypatch.setattr(os, "scandir", without_gone)
    with pytest.raises(CatalogError, match=r"is a folder; .* such as .*owner/model\.gguf"):
        resolve_model(str(tmp_path), tmp_path, pull_missing=False)
