"""``zinc-rt check``: whether this machine is ready, and the plan that ``run`` will make."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from harness.catalog import DEFAULT_ID, find, model_path
from harness.cli import exactness, findings
from harness.host import open as host_open
from harness.residency import Residency, plan_residency
from harness.tiers import TIERS, TierStatus, open_tier, probe
from reference.exact import elementary
from reference.memory.planner import MemoryPlan
from reference.model.gguf.writer import TensorSource
from tests.needs import need_device

KNOWN_TIERS = pytest.mark.usefixtures("known_tiers")


@pytest.fixture(scope="module")
def statuses() -> list[TierStatus]:
    """The tiers of this machine, which a process of its own opens."""
    return probe()


@pytest.fixture
def known_tiers(statuses, monkeypatch) -> None:
    """They are not opened for every check."""
    monkeypatch.setattr(findings, "probe", lambda: statuses)


def test_check_is_ready_with_a_model(zinc, tiny_model):
    result = zinc("check", "--model", tiny_model)
    assert result.code == 0, result.out
    assert result.out.splitlines()[-1] == "READY"
    assert f"set    model = {tiny_model} (flag --model)" in result.out


SIZES: tuple[tuple[object, ...], ...] = ((), ("--context", 64), ("--chunk", 3, "--kv-dtype", "f32"))
PLANNED = [
    *((tier, words) for tier in TIERS if tier != "vulkan" for words in SIZES),
    pytest.param("vulkan", SIZES[-1], marks=pytest.mark.long),
]
"""One size where a processor plays a graphics card, which takes its time."""


@KNOWN_TIERS
@pytest.mark.parametrize(("tier", "words"), PLANNED)
def test_check_plans_what_run_takes(zinc, tiny_model, monkeypatch, tier, words):
    """The very plan: all of a budget of so many bytes, and a byte less is too little for both."""
    need_device(partial(open_tier, tier)).close()
    plans: list[MemoryPlan] = []

    def noted(*arguments: Any) -> Residency:
        found = plan_residency(*arguments)
        plans.append(found.plan)
        return found

    monkeypatch.setattr(host_open, "plan_residency", noted)
    common = ("--model", tiny_model, "--tier", tier, *words)
    assert zinc("check", *common).code == 0
    assert zinc("run", "hi", *common, "--max-tokens", 2).code == 0
    checked, ran = plans
    assert checked == ran
    common = (*common, "--context", ran.context, "--chunk", ran.step_tokens - ran.slots)
    exact = ("--memory-budget", ran.budgeted)
    assert zinc("check", *common, *exact).out.splitlines()[-1] == "READY"
    assert zinc("run", "hi", *common, *exact, "--max-tokens", 2).code == 0
    less = ("--memory-budget", ran.budgeted - 1)
    refused = zinc("run", "hi", *common, *less)
    assert refused.code == 2
    found = zinc("check", *common, *less)
    assert (found.code, found.out.splitlines()[-1]) == (1, "NOT READY")
    assert "WRONG  memory: " in found.out
    assert "--context" in found.out
    assert "--context" in refused.err


def _nan_scale(metadata: dict[str, Any], tensors: dict[str, TensorSource]) -> None:
    _, _, data = tensors["blk.1.ffn_down.weight"]
    data[3, 1] = 0x7E


def _bad_template(metadata: dict[str, Any], tensors: dict[str, TensorSource]) -> None:
    metadata["tokenizer.chat_template"] = "{% for"


@KNOWN_TIERS
@pytest.mark.parametrize(
    ("change", "words", "problem"),
    [
        (_nan_scale, (), "NaN or infinite scale"),
        (_bad_template, (), "template"),
        (lambda metadata, tensors: None, ("--context", 4096), "context: is 4096"),
        (lambda metadata, tensors: None, ("--thinking", "on"), "thinking: "),
    ],
)
def test_what_run_refuses_check_says(zinc, variant, change, words, problem):
    path = variant(change)
    refused = zinc("run", "hi", "--model", path, *words)
    assert refused.code == 2
    assert problem in refused.err
    found = zinc("check", "--model", path, *words)
    assert (found.code, found.out.splitlines()[-1]) == (1, "NOT READY")
    assert refused.err.strip().removeprefix("error: ") in found.out


def test_check_says_what_is_wrong_and_the_remedy(zinc, tiny_model, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = zinc("check", "--json", "--tier", "cuda", "--cache-dir", blocked / "cache")
    assert result.code == 1
    document = json.loads(result.out)
    assert not document["ready"]
    wrong = {f["subject"]: f for f in document["findings"] if not f["ok"]}
    assert set(wrong) == {"tier", "cache", "model"}
    assert all(finding["remedy"] for finding in wrong.values())
    assert document["settings"]["tier"] == {"value": "cuda", "source": "flag --tier"}
    assert zinc("check", "--model", tiny_model, "--cache-dir", blocked / "cache").code == 0
    text = zinc("check", "--tier", "cuda", "--model", tiny_model)
    assert (text.code, text.out.splitlines()[-1]) == (1, "NOT READY")
    assert "WRONG  tier: cuda" in text.out


@KNOWN_TIERS
def test_check_wants_the_default_model_pulled(zinc):
    result = zinc("check")
    assert result.code == 1
    assert f"WRONG  model: {DEFAULT_ID}" in result.out
    assert f"zinc-rt model pull {DEFAULT_ID}" in result.out


@KNOWN_TIERS
def test_check_finds_a_pulled_model_that_was_altered(zinc, tmp_path):
    entry = find(DEFAULT_ID)
    path = model_path(entry, tmp_path)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(entry.file.size)
    result = zinc("check", "--cache-dir", tmp_path)
    assert result.code == 1
    assert entry.file.sha256 in result.out
    assert f"zinc-rt model rm {entry.id} && zinc-rt model pull {entry.id}" in result.out


@KNOWN_TIERS
def test_check_refuses_a_model_that_cannot_run(zinc, variant):
    path = variant(lambda metadata, tensors: metadata.update({"general.architecture": "gpt5"}))
    result = zinc("check", "--model", path)
    assert result.code == 1
    assert "gpt5" in result.out


def test_this_machine_is_exact():
    assert list(exactness.broken_rules()) == []


def test_inexact_exp_is_noticed(monkeypatch):
    """The control: the C library's exp is found out."""
    monkeypatch.setattr(elementary, "exp", np.exp)
    assert list(exactness.broken_rules()) == ["exp differs from rule R2"]


def test_wrong_fold_is_noticed(monkeypatch):
    """The control: numpy's own order of summation is found out."""
    monkeypatch.setattr(exactness, "fold_segment", lambda values: values.cumsum()[-1])
    assert list(exactness.broken_rules()) == ["sums differ from rule R4"]


def test_approximate_division_is_noticed():
    """The control: a quotient through the reciprocal is not the rounded quotient."""
    a, b = exactness._samples(1), exactness._samples(2)
    approximate = a * (np.float32(1.0) / b)
    assert (approximate != a / b).any()
