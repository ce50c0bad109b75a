"""The stored truth holds, and a difference in it is found and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.arithmetic import ARITHMETIC_VERSION
from contract.errors import ConfigError
from harness import goldens
from harness.goldens import (
    DEFAULT_MODEL,
    FOLDER,
    POSITIONS,
    PROMPTS,
    SYNTHETIC,
    SYNTHETIC_SPECS,
    check_default_model,
    check_synthetic,
    main,
    update_synthetic,
)
from harness.synth.architectures import ARCHITECTURES
from harness.synth.spec import QUANTS
from tests.invariance import controls

FEW = 6


def stored(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, dict[str, Any]], Path]:
    """Write a changed golden into a copy of the folder."""

    def write(name: str, golden: dict[str, Any]) -> Path:
        folder = tmp_path / "goldens"
        shutil.copytree(FOLDER, folder)
        (folder / name).write_text(json.dumps(golden), encoding="utf-8")
        return folder

    return write


def test_default_model_gives_the_stored_bits(default_model_path):
    assert check_default_model(FOLDER, default_model_path) == []


def test_synthetic_models_give_the_stored_bits():
    assert check_synthetic(FOLDER) == []


def test_goldens_cover_what_they_promise():
    """Every prompt and position, every architecture and type, and why they were written."""
    default, synthetic = stored(DEFAULT_MODEL), stored(SYNTHETIC)
    for golden in (default, synthetic):
        assert golden["reason"].strip()
        assert golden["arithmetic"] == ARITHMETIC_VERSION
    assert default["prompts"].keys() == PROMPTS.keys()
    assert len(PROMPTS) >= 5
    assert len(synthetic["models"]) == len(SYNTHETIC_SPECS)
    assert {entry["spec"]["architecture"] for entry in synthetic["models"]} == set(ARCHITECTURES)
    assert {entry["spec"]["quant"] for entry in synthetic["models"]} == set(QUANTS)
    for entry in (*default["prompts"].values(), *synthetic["models"]):
        assert len(entry["positions"]) == len(entry["tokens"]) == POSITIONS
        assert len({position["digest"] for position in entry["positions"]}) == POSITIONS


def test_stored_continuations_are_greedy():
    """Each generated token is the largest logit of the position before it."""
    for entry in stored(DEFAULT_MODEL)["prompts"].values():
        tops = [position["top"] for position in entry["positions"]]
        for position in range(entry["prompt_tokens"], POSITIONS):
            assert entry["tokens"][position] == tops[position - 1][0][0]
        for top in tops:
            values = [float.fromhex(value) for _, value in top]
            assert values == sorted(values, reverse=True)


def test_changed_digest_is_named(default_model_path, changed):
    """Negative control: prompt and position of a wrong digest, with both top logits."""
    golden = stored(DEFAULT_MODEL)
    golden["prompts"] = {name: golden["prompts"][name] for name in ("fact", "code")}
    position = golden["prompts"]["code"]["positions"][17]
    position["digest"] = position["digest"][::-1]
    (problem,) = check_default_model(changed(DEFAULT_MODEL, golden), default_model_path)
    assert "prompt 'code': position 17 is the first of 1 that differ" in problem
    token, value = position["top"][0]
    assert problem.count(f"{token}:{float.fromhex(value):.9g} ") == 2


def test_another_model_file_is_named(tiny_model_path):
    (problem,) = check_default_model(FOLDER, tiny_model_path)
    assert str(tiny_model_path) in problem


@pytest.mark.parametrize("part", ["file", "graph"])
def test_changed_part_of_a_synthetic_golden_is_named(changed, part):
    """Negative control: a wrong file or graph digest, of one model only."""
    golden = stored(SYNTHETIC)
    golden["models"] = golden["models"][:2]
    golden["models"][1][part] = "0" * 64
    (problem,) = check_synthetic(changed(SYNTHETIC, golden))
    assert problem.startswith(f"synthetic llama {SYNTHETIC_SPECS[1].quant} seed 1: {part} is ")


def test_another_arithmetic_is_found(changed):
    """Negative control: a tier that sums norms in the library's order fails the check."""
    golden = stored(SYNTHETIC)
    golden["models"] = golden["models"][:1]
    folder = changed(SYNTHETIC, golden)
    (problem,) = check_synthetic(folder, controls.library_sum_tier())
    assert "is the first of" in problem


def test_version_change_is_named(changed):
    golden = stored(SYNTHETIC)
    golden["models"] = []
    golden["arithmetic"] += 1
    (problem,) = check_synthetic(changed(SYNTHETIC, golden))
    assert f"arithmetic version {ARITHMETIC_VERSION + 1}" in problem


def test_update_without_a_reason_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match="--reason"):
        update_synthetic(tmp_path, "  ")
    assert main(["update", "--only", "synthetic", "--folder", str(tmp_path)]) == 2
    assert "--reason" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_update_writes_what_is_stored(tmp_path, capsys, monkeypatch):
    """One command regenerates the goldens: the lines of the committed file but for the reason."""
    monkeypatch.setattr(goldens, "SYNTHETIC_SPECS", SYNTHETIC_SPECS[:FEW])
    arguments = ["--only", "synthetic", "--folder", str(tmp_path)]
    assert main(["update", "--reason", "another reason", *arguments]) == 0
    rewritten = (tmp_path / SYNTHETIC).read_text(encoding="utf-8")
    golden = stored(SYNTHETIC)
    few = {**golden, "reason": "another reason", "models": golden["models"][:FEW]}
    assert json.loads(rewritten) == few
    expected = (FOLDER / SYNTHETIC).read_text(encoding="utf-8")
    reason = json.dumps(golden["reason"], ensure_ascii=False)
    lines = expected.replace(reason, '"another reason"').split("\n")
    assert all(line in lines or f"{line}," in lines for line in rewritten.split("\n"))
    broken = json.loads(rewritten)
    broken["models"] = broken["models"][:1]
    broken["models"][0]["positions"][3]["digest"] = "0" * 64
    (tmp_path / SYNTHETIC).write_text(json.dumps(broken), encoding="utf-8")
    assert main(["check", *arguments]) == 1
    assert "position 3 is the first of 1" in capsys.readouterr().out


def test_missing_goldens_are_one_line(tmp_path, capsys):
    assert main(["check", "--only", "synthetic", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
