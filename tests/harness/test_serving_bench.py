"""What ``--serve`` measures is what it says. How fast anything is decides nothing here."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ExecutionError
from harness.bench.__main__ import main
from harness.bench.engines import PEER
from harness.bench.serving import alone, concurrent, host
from harness.bench.serving.alone import Edited, edit_text, edited_twice, editing_prompt, replay_chat
from harness.bench.serving.host import idle_runner, measure_host, smallest_model
from harness.bench.serving.measure import TARGETS, run_serving, target_verdicts
from harness.bench.serving.plan import SEQUENCES, ServingPlan, serving_runner
from harness.bench.serving.report import METRICS, render_serving
from reference.engine import Engine, EngineOptions
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.needs import need_installed

pytestmark = pytest.mark.usefixtures("native_is_quick")

CHAT_HITS = 0.8
"""The share of prompt tokens that a chat's turns find in the prefix cache."""


UNCACHED = EngineOptions(prefix_cache=False)


def plan_of(path: Path, **fields: Any) -> ServingPlan:
    sizes = {"prompt_tokens": 3, "decode_tokens": 2, "repeat": 2, "host_steps": 0}
    return ServingPlan(path, **{"engines": ("native",), "threads": 1, **sizes, **fields})


@pytest.fixture(scope="module")
def model(tiny_model_path) -> Iterator[Model]:
    model = open_model(tiny_model_path)
    with model.file:
        yield model


@pytest.fixture(scope="module")
def runner(model, tiny_model_path) -> Iterator[ModelRunner]:
    with serving_runner(plan_of(tiny_model_path), model, "native") as runner:
        yield runner


def report_of(plan: ServingPlan) -> dict[str, Any]:
    """Everything, over few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alone, "EDIT_TOKENS", 8)
        patch.setattr(alone, "FIRST_TOKEN_PROMPT", 40)
        patch.setattr(alone, "ANSWER_TOKENS", 4)
        patch.setattr(concurrent, "LEARNING_TOKENS", 8)
        return run_serving(plan)


@pytest.fixture(scope="module")
def report(tiny_model_path) -> dict[str, Any]:
    return report_of(plan_of(tiny_model_path))


def test_most_of_a_chat_comes_from_the_prefix_cache(runner):
    """At the sizes that are measured."""
    chat = replay_chat(runner)
    turn = alone.SAID_TOKENS + alone.ANSWER_TOKENS
    turns = range(alone.TURNS)
    assert chat.prompted == sum(alone.SAID_TOKENS + turn * number for number in turns)
    assert CHAT_HITS <= chat.hit / chat.prompted < 1


def test_a_chat_without_cache_hits_nothing(runner, monkeypatch):
    """The control."""
    monkeypatch.setattr(alone, "ANSWER_TOKENS", 1)
    monkeypatch.setattr(alone, "Engine", lambda runner, **named: Engine(runner, UNCACHED, **named))
    assert replay_chat(runner, turns=3).hit == 0


def test_guessing_an_edit_changes_no_token_and_saves_steps(runner, model):
    prompt = editing_prompt(model)[:200]
    plain, guessed = edited_twice(lambda lookup: edit_text(runner, prompt, lookup=lookup))
    assert plain.steps == len(plain.tokens) - 1
    assert guessed.tokens == plain.tokens
    assert guessed.steps <= plain.steps


def test_an_answer_that_guessing_changed_is_an_error():
    answers = {False: Edited((1, 2), 1, 1.0), True: Edited((1, 3), 1, 1.0)}
    with pytest.raises(ExecutionError, match="guessing changed the answer"):
        edited_twice(answers.__getitem__)


def steps_of(runner: ModelRunner) -> list[int]:
    """The tokens of every step from now on, a list that grows."""
    steps: list[int] = []
    submit = runner.submit

    def counted(inputs: Any) -> Any:
        steps.append(len(inputs.query))
        return submit(inputs)

    runner.submit = counted  # type: ignore[method-assign]
    return steps


def test_the_host_is_measured_without_computing_anything():
    with smallest_model() as small, idle_runner(small, 4, 1024) as runner:
        steps = steps_of(runner)
        cost = measure_host(runner, 20)
        assert len(cost.steady) == len(cost.churn) == 20
        assert steps.count(4) > 20
        assert min(cost.steady) > 0


def test_all_sequences_decode_in_every_steady_step(monkeypatch):
    """However long it took to read their prompts one after another."""
    monkeypatch.setattr(host, "CHUNK_TOKENS", 64)
    with smallest_model() as small, idle_runner(small, 4, 1024) as runner:
        steps = steps_of(runner)
        assert len(host.steady(runner, 20)) == 20
    assert steps[-20:] == [4] * 20
    assert len(steps) < 20 + 4 * 1024 // 64 + 10


def test_every_metric_is_reported_for_every_repetition(report):
    assert set(report["engines"]["native"]) == set(METRICS)
    for found in report["engines"]["native"].values():
        assert len(found["samples"]) == 2
        assert found["minimum"] >= 0
    assert report["peer"] is None
    assert report["ratios"] == {}


def test_targets_of_a_peer_are_judged_only_beside_one(report):
    assert len(report["targets"]) == sum(not target.of_peer for target in TARGETS)
    faster = {"native": {f"decode_{n}": {"median": 2.0} for n in SEQUENCES}}
    assert len(target_verdicts({**report, "ratios": faster})) == len(TARGETS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.metric)
def test_a_target_is_met_from_its_bound_on(target):
    better = 0.01 if target.least else -0.01
    assert target.met(target.bound)
    assert target.met(target.bound + better)
    assert not target.met(target.bound - better)


def test_the_tables_show_every_metric_and_target(report):
    for markdown in (False, True):
        text = render_serving(report, markdown=markdown)
        for label, _, _ in METRICS.values():
            assert label.strip() in text
        assert text.count(" met") + text.count("missed") == len(report["targets"])


def test_the_gate_fails_where_a_target_is_missed(tiny_model_path, report, monkeypatch):
    monkeypatch.setattr("harness.bench.__main__.run_serving", lambda plan, say: shown)
    shown: dict[str, Any] = {}
    for met in (True, False):
        shown = {**report, "targets": [{**found, "met": met} for found in report["targets"]]}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(["--serve", "--gate", "--json", "--model", str(tiny_model_path)])
        assert code == int(not met)
        assert json.loads(out.getvalue()) == json.loads(json.dumps(shown))


@pytest.mark.peer
def test_the_peer_decodes_as_many_together(tiny_model_path):
    need_installed("llama_cpp", "peer")
    report = report_of(plan_of(tiny_model_path, repeat=1, engines=("native", PEER)))
    assert len(report["peer"]["engines"]) == 2
    assert set(report["ratios"]["native"]) == {f"decode_{count}" for count in SEQUENCES}
    assert f"native / {PEER}" in render_serving(report)
