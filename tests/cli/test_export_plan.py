"""``zinc-rt export-plan``: what it writes and prints, and paths and disks that refuse it."""

from pathlib import Path

import pytest

from tests.cli.test_bad_input import refused
from tests.full_disk import largest_file

SIZES = ("--context", 64, "--threads", 2)


@pytest.fixture
def plans(tmp_path) -> Path:
    """The folder that plans are written to."""
    folder = tmp_path / "plans"
    folder.mkdir()
    return folder


def test_a_plan_and_how_to_compile(zinc, tiny_model, plans):
    """Two files, their sizes, and paths that are there."""
    plan = plans / "model.plan"
    result = zinc("export-plan", plan, "--model", tiny_model, *SIZES, "--slots", 3, "--all-logits")
    assert result.code == 0, result.err
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert list(lines) == ["plan", "weights", "library", "compile"]
    for name, path in (("plan", plan), ("weights", plans / "model.plan.weights")):
        assert lines[name] == f"{path} {path.stat().st_size:,} bytes"
    assert Path(lines["library"]).is_file()
    words = lines["compile"].split()
    assert lines["library"] in words
    assert (Path(words[words.index("-I") + 1]) / "zinc_rt.h").is_file()
    assert sorted(plans.iterdir()) == sorted([plan, plans / "model.plan.weights"])


def test_paths_that_cannot_be_written(zinc, tiny_model, plans):
    """One line each, and nothing is left."""
    folder = plans / "folder"
    folder.mkdir()
    for path, text in (
        (plans / "none" / "model.plan", "is not a folder"),
        (folder, "is a folder; name a file"),
        (plans / ("n" * 300), "too long"),
    ):
        refused(zinc("export-plan", path, "--model", tiny_model, *SIZES), text)
    for words in (("--slots", 0), ("--tier", "cpu"), ("--context", 1 << 30)):
        assert zinc("export-plan", plans / "p", "--model", tiny_model, *words).code == 2
    assert not any(path.is_file() for path in plans.rglob("*.partial"))
    assert not (plans / "p").exists()


def test_a_full_disk_keeps_the_plan_that_was_there(zinc, tiny_model, plans):
    """The files of an earlier export stay whole."""
    plan = plans / "model.plan"
    words = ("export-plan", plan, "--model", tiny_model)
    assert zinc(*words, *SIZES).code == 0
    before = {path: path.read_bytes() for path in plans.iterdir()}
    with largest_file(10_000):
        refused(zinc(*words, "--context", 32), "cannot write")
    assert {path: path.read_bytes() for path in plans.iterdir()} == before


@pytest.mark.parametrize("named", [True, False])
def test_a_model_is_not_overwritten_by_a_plan(zinc, tiny_model, plans, named):
    """As ``zinc-rt export-plan model.gguf`` would, where the model is left out."""
    path = plans / "model.gguf"
    path.write_bytes(tiny_model.read_bytes())
    flags = ("--model", path if named else tiny_model)
    refused(zinc("export-plan", path, *flags, *SIZES), "a model is named with --model")
    assert path.read_bytes() == tiny_model.read_bytes()
    assert list(plans.iterdir()) == [path]


@pytest.mark.parametrize("name", ["notes", "notes.weights"])
def test_a_foreign_file_is_not_overwritten_by_a_plan(zinc, tiny_model, plans, name):
    """Neither where the plan is to be nor beside it."""
    path = plans / name
    path.write_bytes(b"notes of years")
    result = zinc("export-plan", plans / "notes", "--model", tiny_model, *SIZES)
    refused(result, "is there and not of that kind")
    assert path.read_bytes() == b"notes of years"
    assert list(plans.iterdir()) == [path]
