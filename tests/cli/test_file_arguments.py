"""Files that arguments name: what is none is refused before anything is computed."""

import os
import stat
from importlib import import_module
from pathlib import Path

import pytest

from accel.native.plan_export import _written
from contract.errors import CatalogError, ZincError
from harness.conformance.package import write_archive
from reference.model.gguf.writer import write_gguf
from tests.tables import table


def plan(path: Path) -> None:
    with _written(path) as file:
        file.write(b"plan")


@pytest.mark.parametrize(
    "write",
    [plan, lambda path: write_archive(path, b"archive"), lambda path: write_gguf(path, {}, {})],
    ids=["plan", "package", "model"],
)
def test_what_is_no_file_is_not_replaced(tmp_path, write):
    """``--out /dev/null`` of root must leave /dev/null as it is."""
    folder = tmp_path / "folder"
    pipe, file = folder / "pipe", folder / "file"
    folder.mkdir()
    os.mkfifo(pipe)
    with pytest.raises(ZincError, match="is no file"):
        write(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(folder) == ["pipe"]
    file.write_bytes(b"old")
    write(file)
    assert file.read_bytes() not in (b"", b"old")


@pytest.mark.parametrize(
    "words", table(__file__, "test_file_arguments")["an_empty_path_is_refused"], ids=" ".join
)
def test_an_empty_path_is_refused(zinc, tmp_path, monkeypatch, words):
    """It is neither the folder one is in, nor the default."""
    folder = tmp_path / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    result = zinc(*words)
    assert (result.code, result.out) == (2, "")
    assert "'' is not a path" in result.err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("place", "problem"), [("none/file", "is not a folder"), (".", "is a folder; name a file")]
)
@pytest.mark.parametrize(
    "words",
    table(__file__, "test_file_arguments")["an_output_that_cannot_be_is_refused_first"],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_an_output_that_cannot_be_is_refused_first(
    zinc, tmp_path, tiny_model, monkeypatch, words, place, problem
):
    """An answer, or half an hour of cases, is not computed to be lost."""
    monkeypatch.setenv("ZINC_RT_MODEL", str(tiny_model))
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    result = zinc(*words, folder / place if place == "." else folder / f"{place}.svg")
    assert (result.code, result.out) == (2, "")
    assert f"{words[-1]}: " in result.err
    assert problem in result.err
    assert result.err.count("\n") == 1


WRITTEN = ("record", "state", "receipts", "slot-save-path", "disk-cache")
"""Settings that name folders to write to."""


@pytest.fixture
def fetched(monkeypatch) -> list[object]:
    """The models that were to be downloaded, of which none is."""
    models: list[object] = []

    def refuse(model: object, *_: object) -> Path:
        models.append(model)
        raise CatalogError("no download here")

    monkeypatch.setattr(import_module("harness.catalog.pull"), "pull", refuse)
    return models


@pytest.mark.parametrize("where", ["file", "file/below", "link", "link/below", "closed"])
@pytest.mark.parametrize("name", [*WRITTEN, "cache-dir"])
def test_a_folder_that_cannot_be_is_named_first(zinc, tmp_path, monkeypatch, fetched, name, where):
    """Before the model is downloaded or loaded, with the setting and what to do."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "closed").mkdir()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode)
    )
    result = zinc("serve", f"--{name}", tmp_path / where)
    if (name, where) == ("cache-dir", "closed"):
        assert fetched  # Models may be there that are read alone.
        return
    assert (result.code, result.out, fetched) == (2, "", [])
    problem = {"file": "is no folder", "link": "is a link to nothing", "closed": "nothing may be"}
    assert f"flag --{name}: {tmp_path / where}: " in result.err
    assert problem[where.partition("/")[0]] in result.err
    assert "; name a folder" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(("name", "where", "problem"), [
    ("ledger", "folder", "it is a folder; name another file"),
    ("ledger", "file/below", "is no folder; name another file"),
    ("ledger", "pipe", "it is no file"),
    ("tenants", "folder", "it is a folder; name a file"),
    ("tenants", "nothing", "it is not there"),
    ("lora", "folder", "it is a folder; name a GGUF file"),
    ("lora", "nothing", "it is not there"),
])  # fmt: skip
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_a_file_that_cannot_be_is_named_first(
    zinc, tmp_path, monkeypatch, fetched, source, name, where, problem
):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    words: tuple[object, ...] = (f"--{name}", tmp_path / where)
    shown = f"flag --{name}"
    if source == "environment":
        shown = f"environment ZINC_RT_{name.upper()}"
        monkeypatch.setenv(shown.removeprefix("environment "), str(tmp_path / where))
        words = ()
    result = zinc("serve", *words)
    assert (result.code, result.out, fetched) == (2, "", [])
    assert f"{shown}: {tmp_path / where}: " in result.err
    assert problem in result.err


@pytest.mark.parametrize("words", [("list",), ("pull", "smollm2-135m-instruct"), ("use", "a")])
def test_a_folder_of_models_that_is_none_is_named(zinc, tmp_path, words):
    (tmp_path / "file").write_bytes(b"")
    result = zinc("model", *words, "--cache-dir", tmp_path / "file")
    assert (result.code, result.out) == (2, "")
    assert f"flag --cache-dir: {tmp_path / 'file'}: it is no folder" in result.err


@pytest.mark.parametrize("name", [*WRITTEN, "cache-dir"])
def test_a_folder_that_is_not_there_yet_is_made(zinc, tmp_path, fetched, name):
    """Negative control, with parents that are not there either."""
    result = zinc("serve", f"--{name}", tmp_path / "a" / "b")
    assert fetched
    assert "no download here" in result.err


@pytest.mark.parametrize(
    "words",
    table(__file__, "test_file_arguments")["a_tier_that_is_not_there_fetches_no_model"],
    ids=" ".join,
)
def test_a_tier_that_is_not_there_fetches_no_model(zinc, tmp_path, fetched, words):
    (tmp_path / "file").write_text("text")
    result = zinc(*(tmp_path / word if word == "file" else word for word in words))
    assert (result.code, result.out, fetched) == (2, "", [])
    assert words[-1].rpartition(",")[2] in result.err


@pytest.mark.parametrize("words", [
    ("run", "hi", "--tier", "cpu"), ("bench", "--tiers", "cpu"),
    ("bench", "--server", "--tiers", "cpu"), ("validate", "--tiers", "cpu"),
], ids=" ".join)  # fmt: skip
def test_a_tier_that_is_there_fetches_its_model(zinc, fetched, words):
    """Negative control."""
    assert "no download here" in zinc(*words).err
    assert fetched


@pytest.mark.parametrize("verb", [("list",), ("add", "bob"), ("rotate", "bob"), ("rm", "bob")])
@pytest.mark.parametrize(("where", "problem"), [
    ("folder", "it is a folder"), ("file/below", "is no folder"), ("none/file", "it is not there"),
])  # fmt: skip
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_a_file_of_tenants_that_cannot_be_is_named_with_its_setting(
    zinc, tmp_path, monkeypatch, source, where, problem, verb
):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    words: tuple[object, ...] = ("--tenants", tmp_path / where)
    if source == "environment":
        monkeypatch.setenv("ZINC_RT_TENANTS", str(words[1]))
        words = ()
    result = zinc("tenants", *verb, *words)
    if verb[0] == "add" and where == "none/file":
        assert result.code == 0
        assert len(result.out.split()) == 1, "the key alone"
        return
    assert (result.code, result.out) == (2, "")
    name = "flag --tenants" if source == "flag" else "environment ZINC_RT_TENANTS"
    assert f"{name}: {tmp_path / where}: " in result.err
    assert problem in result.err or "it is not there" in result.err


@pytest.mark.parametrize("words", [("usage",), ("add", "bob")])
def test_a_ledger_that_cannot_be_is_named_with_its_setting(zinc, tmp_path, words):
    ledger = ("--ledger", tmp_path)
    result = zinc("tenants", *words, "--tenants", tmp_path / "tenants.toml", *ledger)
    assert (result.code, result.out) == (2, "")
    assert f"flag --ledger: {tmp_path}: it is a folder" in result.err


@pytest.mark.parametrize("words", [("key",), ("key", "--rotate"), ("list",), ("export", "0")])
@pytest.mark.parametrize("where", ["file", "file/below", "none"])
def test_a_folder_of_receipts_that_cannot_be_is_named_with_its_flag(zinc, tmp_path, words, where):
    (tmp_path / "file").write_bytes(b"")
    result = zinc("receipts", *words, "--receipts", tmp_path / where)
    if words[0] == "key" and where == "none":
        assert (result.code, result.err) == (0, "")
        return
    assert (result.code, result.out) == (2, "")
    assert str(tmp_path / where) in result.err
    assert "--receipts" in result.err


def files_in(folder: Path) -> dict[Path, bytes]:
    """The files of a folder, by name."""
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind", ["model", "link", "hard link", "read"])
@pytest.mark.parametrize(
    "words",
    table(__file__, "test_file_arguments")["no_command_writes_over_what_is_read_or_a_model"],
    ids=lambda words: " ".join(word for word in words if word.startswith("-") or word == words[0]),
)
def test_no_command_writes_over_what_is_read_or_a_model(
    zinc, tmp_path, tiny_model, monkeypatch, words, kind
):
    """``logits --out model.gguf`` even cut the file that it had mapped."""
    monkeypatch.setenv("ZINC_RT_MODEL", str(tiny_model))
    monkeypatch.chdir(tmp_path)
    model, read = tmp_path / "model.gguf", tmp_path / "read"
    model.write_bytes(tiny_model.read_bytes().replace(b"zinc_rt.synth", b"another.maker"))
    read.write_bytes(b"what somebody wrote")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "hard link").hardlink_to(model)
    if kind == "read" and "read" not in words:
        kind = "model"
    before = files_in(tmp_path)
    result = zinc(*words, "model.gguf" if kind == "model" else kind)
    assert (result.code, result.out) == (2, "")
    assert "name another" in result.err
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--receipt", "-", "hi"),
        ("graph", "--out", "-"),
        ("run-batch", "-i", "-", "-o", "new"),
        ("run-batch", "-i", "old", "-o", "-"),
    ],
)
def test_a_dash_is_no_file(zinc, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    result = zinc(*words)
    assert (result.code, result.out) == (2, "")
    assert "- is no file" in result.err
    assert not (tmp_path / "-").exists()


def test_two_outputs_are_two_files(zinc, tmp_path):
    path = tmp_path / "new.gguf"
    result = zinc("synth", "--arch", "llama", "--out", path, "--eagle-out", path)
    assert (result.code, result.out) == (2, "")
    assert "--eagle-out" in result.err
    assert not path.exists()


def test_a_random_model_may_be_made_again(zinc, tmp_path):
    """Negative control: the model and its head replace those of before."""
    words = ("synth", "--arch", "llama", "--out", tmp_path / "a", "--eagle-out", tmp_path / "b")
    for _ in range(2):
        assert zinc(*words).code == 0
