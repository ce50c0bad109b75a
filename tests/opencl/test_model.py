"""Whole models: every logit and token of the OpenCL tier equals the CPU tier's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accel.opencl.tier import OpenClTier
from contract.dtypes import F16, F32, Q8_0, DType
from contract.types import Request
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model
from tests.model_runs import assert_same, compare, generate


@pytest.mark.parametrize(
    ("architecture", "quant", "kv_dtype"),
    [
        ("llama", "q4_0", F16),
        ("llama", "q8_0", F32),
        ("qwen2", "q5_k", F16),
        ("qwen3", "q6_k", F16),
        ("llama", "f16", F32),
        ("qwen2", "bf16", F16),
        ("llama", "f32", F32),
        ("qwen3", "q4_k_m", Q8_0),
        ("llama", "q5_0", Q8_0),
    ],
    ids=str,
)
def test_every_family_and_storage(
    tier: OpenClTier,
    synthetic_model: Callable[..., Path],
    architecture: str,
    quant: str,
    kv_dtype: DType,
) -> None:
    """Biases, head norms, tied embeddings, float and quantized weights, both page types."""
    path = synthetic_model(architecture=architecture, quant=quant)
    compare(open_model(path), tier, kv_dtype)


def test_default_model_writes_the_cpu_tiers_tokens(tier: OpenClTier, default_model: Model) -> None:
    """Twenty greedy tokens of the default model, with all their logits."""
    prompt = tuple(default_model.tokenizer.encode("The sky is blue because"))
    request = (Request(1, prompt, 20),)
    with CpuTier() as cpu:
        expected = generate(default_model, cpu, request)
    assert_same(expected, generate(default_model, tier, request))
