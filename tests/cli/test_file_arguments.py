"""Files that arguments name: what is none is refused before anything is computed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.native.plan_export import _written
from contract.errors import ZincError
from harness.conformance.package import write_archive
from reference.model.gguf.writer import write_gguf
from tests.cli.conftest import Result

Zinc = Callable[..., Result]


def plan(path: Path) -> None:
    with _written(path) as file:
        file.write(b"plan")


@pytest.mark.parametrize(
    "write",
    [plan, lambda path: write_archive(path, b"archive"), lambda path: write_gguf(path, {}, {})],
    ids=["plan", "package", "model"],
)
def test_what_is_no_file_is_not_replaced(tmp_path: Path, write: Callable[[Path], None]) -> None:
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
    "words",
    [
        ("run", "hi", "--receipt", ""),
        ("run", "hi", "--trace", ""),
        ("run", "hi", "--timeline", ""),
        ("verify", ""),
        ("verify", "request.json", ""),
        ("replay", ""),
        ("asm", ""),
        ("export-plan", ""),
        ("tenants", "check", ""),
        ("receipts", "list", "--receipts", ""),
        ("synth", "--arch", "llama", "--out", ""),
        ("conformance", "--verify", ""),
        ("card-test", "--out", ""),
        ("config", "init", "--config", ""),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_refused(
    zinc: Zinc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
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
    [
        ("run", "hi", "--tier", "cpu", "--receipt"),
        ("conformance", "--tier", "cpu", "--out"),
        ("card-test", "--device", "simulated", "--out"),
        ("bench", "--plot"),
    ],
    ids=lambda words: words[0],
)
def test_an_output_that_cannot_be_is_refused_first(
    zinc: Zinc,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    place: str,
    problem: str,
) -> None:
    """An answer, or half an hour of cases, is not computed to be lost."""
    monkeypatch.setenv("ZINC_RT_MODEL", str(tiny_model))
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    result = zinc(*words, folder / place if place == "." else folder / f"{place}.svg")
    assert (result.code, result.out) == (2, "")
    assert f"{words[-1]}: " in result.err
    assert problem in result.err
    assert result.err.count("\n") == 1
