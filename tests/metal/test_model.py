"""Whole models on the simulated device: every logit and token equals the CPU tier's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accel.metal import memory
from accel.packets import work
from harness.validate import Workload, validate
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from tests.families_table import FAMILIES
from tests.metal.conftest import OpenTier
from tests.model_runs import FEW, assert_same, compare, generate
from tests.opencl.test_families import MODELS, TRACED, WORKLOAD

SyntheticModel = Callable[..., Path]
FIRST = next(iter(TRACED))


def test_cut_steps_and_weights_read_where_they_are(
    open_metal: OpenTier, synthetic_model: SyntheticModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch a command buffer of its own; all weights that stay as stored are views."""
    monkeypatch.setattr(work, "BATCH_WORK", 1)
    monkeypatch.setattr(memory, "VIEW_BYTES", 1)
    model = open_model(synthetic_model(architecture="qwen3", quant="f16"))
    tier = open_metal()
    expected = generate(model, CpuTier(), FEW)
    assert_same(expected, generate(model, tier, FEW))


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
