"""No folder for temporary files can be written: a container without one, or a full disk."""

import json
import tempfile
from pathlib import Path

import pytest

ENGINE = ("--tier", "cpu", "--context", "64")
REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
COMMANDS = {
    "run": ("run", "a", "--raw", "--max-tokens", "1", *ENGINE),
    "score": ("score", "-p", "abc", "--tier", "cpu"),
    "logits": ("logits", "-p", "abc", "--tier", "cpu"),
    "verify": ("verify", "{receipt}", *ENGINE),
    "run-batch": ("run-batch", "-i", "{requests}", "-o", "{answers}", *ENGINE),
    "replay": ("replay", "{trace}", "--tier", "cpu"),
}


@pytest.fixture
def no_temporary_folder(monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])


@pytest.fixture(scope="module")
def files(tiny_model, tmp_path_factory) -> dict[str, Path]:
    """What the commands read and write."""
    folder = tmp_path_factory.mktemp("files")
    named = {name: folder / name for name in ("receipt", "requests", "answers", "trace")}
    body = {"model": tiny_model.stem, "prompt": "a", "max_tokens": 1}
    named["requests"].write_text(json.dumps({**REQUEST, "body": body}))
    return named


@pytest.mark.parametrize("name", COMMANDS)
def test_what_needs_no_temporary_file_works(zinc, tiny_model, files, request, name, monkeypatch):
    if name in ("verify", "replay"):
        written = {"verify": ("--receipt", files["receipt"]), "replay": ("--trace", files["trace"])}
        made = zinc(*COMMANDS["run"], "--model", tiny_model, *written[name])
        assert made.code == 0, made.err
    request.getfixturevalue("no_temporary_folder")
    words = [word.format(**files) for word in COMMANDS[name]]
    result = zinc(*words, "--model", tiny_model)
    assert result.code == 0, result.err


def test_what_needs_one_says_so(zinc, tmp_path, no_temporary_folder):
    result = zinc("synth", "--arch", "qwen3", "--out", tmp_path / "a.gguf")
    assert (result.code, result.err.count("\n")) == (1, 1)
    advice = "free some disk space, or set TMPDIR to another folder"
    assert result.err == f"error: No usable temporary directory found in ['/nowhere']; {advice}\n"
