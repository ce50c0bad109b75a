"""Whole models on the Vulkan tier: every logit and token equals the CPU tier's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from contract.dtypes import F16
from contract.types import Request
from harness.validate import Workload, validate
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from tests.families_table import FAMILIES
from tests.few_rows import ATTENDS_LAST, assert_definitions
from tests.long_cases import long_except
from tests.model_runs import SHORT, compare
from tests.opencl.test_families import MODELS, TRACED, WORKLOAD
from tests.vulkan.conftest import OpenTier

SyntheticModel = Callable[..., Path]

QUANTS = {"qwen3next": "q4_0", "gemma4-shared-kv": "q5_0"}
"""In place of floats, whose products take longest on a processor that plays a graphics card; cases
of parity have them."""
GREEDY = tuple(Request(one.id, one.prompt, 3, ignore_end=True) for one in SHORT[:2])
"""How tokens are sampled is no matter of the architecture."""
PICKED = {
    "qwen2": FAMILIES["qwen2"],
    "qwen35moe": ATTENDS_LAST,
    "gemma4": FAMILIES["gemma4-per-layer-embeddings"],
}
"""Two tensors that rows are picked of, two of which one is normed again, three."""
FAMILY_MODELS = {name: (QUANTS.get(name, quant), kv) for name, (quant, kv) in MODELS.items()}


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits_and_tokens_are_the_cpu_tiers(
    open_vulkan: OpenTier, synthetic_model: SyntheticModel, name: str
) -> None:
    """Every architecture: mixed prefill and decode of two requests."""
    quant, kv_dtype = FAMILY_MODELS[name]
    path = synthetic_model(quant=quant, **FAMILIES[name])
    compare(open_model(path), open_vulkan(), kv_dtype, GREEDY)


@pytest.mark.parametrize("name", long_except(PICKED, "qwen2"))
def test_steps_of_few_rows_are_the_definitions(
    open_vulkan: OpenTier, synthetic_model: SyntheticModel, name: str
) -> None:
    """Rows are picked in the last layer: some, none, and those of the middle of a chunk."""
    model = open_model(synthetic_model(quant="q4_k_m", **PICKED[name]))
    assert_definitions(model, open_vulkan(), F16)


@pytest.mark.parametrize("name", long_except(TRACED, "qwen3next-fused-ssm-in"))
def test_every_result_is_the_definitions(
    open_vulkan: OpenTier, synthetic_model: SyntheticModel, name: str
) -> None:
    """Node by node, the states included, and once more as in production."""
    quant, kv_dtype = TRACED[name]
    model = open_model(synthetic_model(quant=quant, **FAMILIES[name]))
    workload = Workload(WORKLOAD.tokens[:24], WORKLOAD.chunk, WORKLOAD.decode, kv_dtype)
    with CpuTier(definitions_only=True) as oracle:
        report = validate(model, oracle, {"vulkan": open_vulkan()}, workload)
    assert report.agrees, report.verdict
    assert report.steps == len(workload.steps())
