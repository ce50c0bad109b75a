"""The current folder was removed, or may not be entered."""

import os
from pathlib import Path
from typing import Any

import pytest

from contract.errors import CatalogError
from harness.catalog import DEFAULT_ID, resolve_model

WRITE = {
    "synth": ("synth", "--arch", "qwen3", "--out", "new"),
    "graph": ("graph", "{model}", "--out", "new"),
    "logits": ("logits", "--tokens", "1", "--model", "{model}", "--out", "new"),
    "export-plan": ("export-plan", "new", "--model", "{model}"),
    "run-batch": ("run-batch", "-i", "{model}", "-o", "new", "--model", "{model}"),
    "receipt": ("run", "a", "--raw", "--model", "{model}", "--receipt", "new"),
    "trace": ("run", "a", "--raw", "--model", "{model}", "--trace", "new"),
    "tenants": ("tenants", "add", "alice", "--tenants", "new"),
    "config": ("config", "init", "--config", "new"),
}


@pytest.fixture
def removed(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.mark.parametrize("name", WRITE)
def test_what_is_written_to_a_folder_that_is_gone(zinc, tiny_model, removed, name):
    result = zinc(*(word.format(model=tiny_model) for word in WRITE[name]))
    named = "new: cannot write: No such file or directory"
    gone = "the current folder is not there any more; change to another one (cd)"
    assert result.code == (2 if name == "config" else 1)
    assert result.err == f"error: {named if name == 'config' else gone}\n"


@pytest.mark.parametrize("name", [DEFAULT_ID, "hf.co/unsloth/Qwen3-4B-GGUF:Q4_K_M", None])
def test_a_name_of_the_catalog_is_found_from_a_folder_that_may_not_be_entered(
    zinc, tmp_path, monkeypatch, name
):
    """As of a user whom ``sudo`` leaves in another's home."""
    stat = Path.stat

    def refused(path: Path, **options: Any) -> os.stat_result:
        if not path.is_absolute():
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(CatalogError, match="is not pulled yet"):
        resolve_model(name, tmp_path, pull_missing=False)
    words = () if name is None else ("--model", name)
    result = zinc("check", "--tier", "cpu", "--cache-dir", tmp_path, *words)
    assert (result.code, "Permission denied" in result.out + result.err) == (1, False)
    assert "zinc-rt model pull" in result.out
