"""Every architecture on the OpenCL tier: its logits and tokens, and node by node where it differs
most from a dense decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accel.opencl.tier import OpenClTier
from contract.dtypes import F16, F32, Q8_0
from harness.validate import Workload, validate
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from tests.families_table import FAMILIES
from tests.few_rows import ATTENDS_LAST, assert_definitions
from tests.model_runs import compare

SyntheticModel = Callable[..., Path]

MODELS = {
    "llama-8-experts": ("q4_k_m", F16),
    "smollm3": ("q4_k_m", F16),
    "granite": ("q4_0", Q8_0),
    "glm4-biases": ("q4_k_m", F16),
    "phi3-long-rope": ("q8_0", F32),
    "olmo2-windows": ("q5_k", F16),
    "qwen2-untied-mqa": ("q5_1", Q8_0),
    "qwen3-wide-heads": ("q8_0", F16),
    "qwen3moe-untied-fused-qkv": ("q3_k", Q8_0),
    "qwen35": ("q4_k_m", F16),
    "qwen35-fused-qkv": ("q6_k", F32),
    "qwen35moe-fused": ("q4_k_m", Q8_0),
    "qwen3next": ("bf16", F16),
    "qwen3next-fused-ssm-in": ("iq4_xs", F32),
    "gemma3-untied-softcap-linear": ("q4_0", Q8_0),
    "gemma4-per-layer-embeddings": ("q8_0", F16),
    "gemma4-shared-kv": ("f16", F32),
    "gemma4-experts-fused-values-from-keys": ("q4_k_m", F16),
}
TRACED = {
    "qwen35moe-fused": ("q4_k_m", F16),
    "qwen3next-fused-ssm-in": ("q5_1", Q8_0),
    "gemma4-per-layer-embeddings": ("q4_k_m", F32),
    "gemma4-experts": ("mxfp4", F16),
}
WORKLOAD = Workload(tuple(range(7, 48)), chunk=19, decode=3)
"""Two windows of 20 positions, pages of 16, chunks that line up with neither."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_the_cpu_tiers(
    tier: OpenClTier, synthetic_model: SyntheticModel, name: str
) -> None:
    """Mixed prefill and decode of four requests in three slots, greedy and sampled."""
    quant, kv_dtype = MODELS[name]
    path = synthetic_model(quant=quant, **FAMILIES[name])
    compare(open_model(path), tier, kv_dtype)


@pytest.mark.parametrize("name", [*MODELS, "attends last"])
def test_steps_of_few_rows_are_the_definitions(
    tier: OpenClTier, synthetic_model: SyntheticModel, name: str
) -> None:
    """Rows are picked in the last layer: some, none, and those of the middle of a chunk."""
    quant, kv_dtype = MODELS.get(name, ("q4_k_m", F16))
    model = open_model(synthetic_model(quant=quant, **FAMILIES.get(name, ATTENDS_LAST)))
    assert_definitions(model, tier, kv_dtype)


def test_every_architecture_is_here() -> None:
    found = {FAMILIES[name]["architecture"] for name in MODELS}
    assert found == {fields["architecture"] for fields in FAMILIES.values()}


@pytest.mark.parametrize("name", TRACED)
def test_every_result_is_the_definitions(
    tier: OpenClTier, synthetic_model: SyntheticModel, name: str
) -> None:
    """Node by node, the states included, and once more as in production."""
    quant, kv_dtype = TRACED[name]
    model = open_model(synthetic_model(quant=quant, **FAMILIES[name]))
    workload = Workload(WORKLOAD.tokens, WORKLOAD.chunk, WORKLOAD.decode, kv_dtype)
    with CpuTier(definitions_only=True) as oracle, CpuTier() as cpu:
        report = validate(model, oracle, {"cpu": cpu, "opencl": tier}, workload)
    assert report.agrees, report.verdict
    assert report.steps == len(workload.steps())
