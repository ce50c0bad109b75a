"""``zinc-rt graph`` on several models: every format, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Result


@pytest.fixture
def shorter(variant) -> Path:
    """The tiny model with a context of 512 tokens."""

    def change(metadata: dict[str, Any], tensors: object) -> None:
        (key,) = (name for name in metadata if name.endswith(".context_length"))
        metadata[key] = metadata[key].__class__(512)

    return variant(change)


def refused(result: Result, *said: object) -> None:
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    for words in said:
        assert str(words) in result.err


def test_json_is_a_list_of_models_at_one_context(zinc, tiny_model, shorter):
    result = zinc("graph", tiny_model, shorter)
    documents = json.loads(result.out)
    assert [document["model"] for document in documents] == ["tiny.gguf", "variant.gguf"]
    assert {document["context"] for document in documents} == {512}
    (alone,) = json.loads(zinc("graph", tiny_model).out)
    assert alone["context"] == 1024


def test_rates_change_the_estimate_and_nothing_else(zinc, tiny_model):
    (slow,) = json.loads(zinc("graph", tiny_model, "--bandwidth", "1k", "--flops", "1e21").out)
    (fast,) = json.loads(zinc("graph", tiny_model, "--bandwidth", "2k", "--flops", "1e21").out)
    paths = slow.pop("critical_path"), fast.pop("critical_path")
    assert paths[0]["seconds"] == 2 * paths[1]["seconds"]
    assert slow.pop("machine") == {"bytes_per_second": 1000.0, "flops_per_second": 1e21}
    assert fast.pop("machine") == {"bytes_per_second": 2000.0, "flops_per_second": 1e21}
    assert slow == fast


def test_dot_has_a_cluster_a_model(zinc, tiny_model, shorter):
    text = zinc("graph", tiny_model, shorter, "--format", "dot").out
    labels = re.findall(r'subgraph cluster_g\d+ \{ label="([^"]+)"', text)
    assert labels == ["tiny.gguf", "variant.gguf"]


def test_html_to_a_file(zinc, tiny_model, shorter, tmp_path):
    out = tmp_path / "report.html"
    result = zinc("graph", tiny_model, shorter, "--format", "html", "-o", out)
    assert (result.code, result.out) == (0, "")
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<article") == 2


def test_files_of_the_same_name_are_told_apart(zinc, tiny_model, shorter, tmp_path):
    other = tmp_path / "other" / tiny_model.name
    other.parent.mkdir()
    shutil.copy(shorter, other)
    documents = json.loads(zinc("graph", tiny_model, other).out)
    assert [document["model"] for document in documents] == [str(tiny_model), str(other)]


def test_a_missing_file_is_named(zinc, tiny_model):
    refused(zinc("graph", tiny_model, "absent.gguf"), "absent.gguf")


def test_the_same_file_twice_is_refused(zinc, tiny_model, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_model)
    for again in (tiny_model, link):
        refused(zinc("graph", tiny_model, again), again, tiny_model, "named already")


def test_output_that_cannot_be_written(zinc, tiny_model, tmp_path):
    for out in (tmp_path, tmp_path / "absent" / "report.html"):
        result = zinc("graph", tiny_model, "--format", "html", "-o", out)
        refused(result, "--out", out if out.is_dir() else out.parent, "a folder")


def test_a_model_is_not_overwritten(zinc, shorter):
    before = shorter.read_bytes()
    refused(zinc("graph", shorter, "-o", shorter), "--out", shorter)
    assert shorter.read_bytes() == before


def test_a_model_is_named_in_one_way(zinc, tiny_model):
    refused(zinc("graph", tiny_model, "--model", tiny_model), "--model", tiny_model)


def test_too_many_models(zinc, tiny_model):
    refused(zinc("graph", *[tiny_model] * 17), "17 models", "16")


@pytest.mark.parametrize("flag", ["--bandwidth", "--flops"])
@pytest.mark.parametrize("text", ["0", "-1", "x", "1Q", "1e22", "nan", "inf", "1e999", ""])
def test_a_rate_that_is_none(zinc, tiny_model, flag, text):
    refused(zinc("graph", tiny_model, f"{flag}={text}"), flag, repr(text), "expected")
