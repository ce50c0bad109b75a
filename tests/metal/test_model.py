"""Whole models on the simulated device: every logit and token equals the CPU tier's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accel.metal import memory
from accel.packets import work
from contract.types import Request
from harness.validate import Workload, validate
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.amd.test_model import SHORT
from tests.families_table import FAMILIES
from tests.few_rows import assert_definitions
from tests.metal.conftest import OpenTier
from tests.opencl.test_families import MODELS, TRACED, WORKLOAD
from tests.opencl.test_model import REQUESTS, assert_same, compare, generate

SyntheticModel = Callable[..., Path]
FIRST = next(iter(TRACED))


@pytest.mark.parametrize(
    "requests", [SHORT, pytest.param(REQUESTS, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_logits_and_tokens_are_the_cpu_tiers(
    open_metal: OpenTier, tiny_model_path: Path, requests: tuple[Request, ...]
) -> None:
    """Mixed prefill and decode, greedy and sampled."""
    model = open_model(tiny_model_path)
    expected = generate(model, CpuTier(), requests)
    assert_same(expected, generate(model, open_metal(), requests))


def test_cut_steps_and_weights_read_where_they_are(
    open_metal: OpenTier, synthetic_model: SyntheticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch a command buffer of its own; all weights that stay as stored are views."""
    monkeypatch.setattr(work, "BATCH_WORK", 1)
    monkeypatch.setattr(memory, "VIEW_BYTES", 1)
    model = open_model(synthetic_model(architecture="qwen3", quant="f16"))
    tier = open_metal()
    expected = generate(model, CpuTier(), SHORT)
    assert_same(expected, generate(model, tier, SHORT))


def test_steps_of_few_rows_are_the_definitions(open_metal: OpenTier, tiny_model_path: Path) -> None:
    """Rows are picked in the last layer: some, none, and those of the middle of a chunk."""
    assert_definitions(open_model(tiny_model_path), open_metal())


@pytest.mark.parametrize("ahead", [0, 3])
def test_steps_fed_on_the_device_sample_the_same_tokens(
    open_metal: OpenTier, tiny_model_path: Path, ahead: int
) -> None:
    """Decode without the host between the steps. Nothing runs before somebody looks, so all that
    must not change until then has changed by then."""
    model = open_model(tiny_model_path)
    outcomes = []
    for tier, depth in ((CpuTier(), 0), (open_metal(), ahead)):
        with ModelRunner(model, tier, Limits(2, 32, 8, step_tokens=16, step_rows=4)) as runner:
            engine = Engine(runner, steps_ahead=depth)
            for request in SHORT:
                engine.submit(request)
            outcomes.append([(event.request_id, event.token) for event in engine.run()])
    assert outcomes[0] == outcomes[1]


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_families(open_metal: OpenTier, synthetic_model: SyntheticModel, name: str) -> None:
    """Every architecture: mixed prefill and decode of four requests in three slots."""
    quant, kv_dtype = MODELS[name]
    model = open_model(synthetic_model(quant=quant, **FAMILIES[name]))
    compare(model, open_metal(), kv_dtype)


@pytest.mark.parametrize(
    "name",
    [*list(TRACED)[:1], *(pytest.param(n, marks=pytest.mark.soak) for n in list(TRACED)[1:])],
)
def test_every_result_is_the_definitions(
    open_metal: OpenTier, synthetic_model: SyntheticModel, name: str
) -> None:
    """Node by node, the states included, and once more as in production."""
    quant, kv_dtype = TRACED[name]
    model = open_model(synthetic_model(quant=quant, **FAMILIES[name]))
    workload = Workload(WORKLOAD.tokens, WORKLOAD.chunk, WORKLOAD.decode, kv_dtype)
    with CpuTier(definitions_only=True) as oracle:
        report = validate(model, oracle, {"metal": open_metal()}, workload)
    assert report.agrees, report.verdict
    assert report.steps == len(workload.steps())
