"""Requests with LoRA adapters beside requests without: the bits of the CPU tier on every tier."""

from dataclasses import replace
from pathlib import Path

import pytest

from contract.types import Request
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model
from tests.adapters import write_adapter
from tests.families_table import FAMILIES
from tests.model_runs import FEW, SHORT, assert_same, compare, generate

CHOICES = (((0, 1.0),), (), ((1, -0.7), (0, 0.3)), ((1, 1.5),))
"""One adapter, none, two, the other one."""
SOME = ("attn_v", "ffn_down", "attn_qkv")
QUICK = ("native", "opencl")
SLOW = {
    "vulkan": pytest.mark.long,
    "metal-simulated": pytest.mark.soak,
    "amd-kfd": pytest.mark.soak,
}
WAYS = [*QUICK, *(pytest.param(way, marks=mark) for way, mark in SLOW.items())]


def adapted(path: Path, folder: Path) -> Model:
    """The model with an adapter of all projections, and one of rank 20 of some."""
    first = write_adapter(folder / "first.gguf", path, rank=4)
    second = write_adapter(
        folder / "second.gguf", path, rank=20, seed=2, changed=lambda n: n.split(".")[-2] in SOME
    )
    return open_model(path, (first, second))


def with_adapters(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    return tuple(
        replace(request, adapters=chosen)
        for request, chosen in zip(requests, CHOICES, strict=False)
    )


@pytest.mark.parametrize("way", WAYS, indirect=True, scope="module")
def test_logits_and_tokens_are_the_cpu_tiers(tier, synthetic_model, tmp_path):
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    requests = SHORT if tier.info.name in QUICK else FEW
    compare(adapted(path, tmp_path), tier, requests=with_adapters(requests))


def test_the_cpu_tier_has_the_bits_of_the_definitions(synthetic_model, tmp_path):
    """Also where matrices are rows of a tensor: the adapter has the same rows."""
    model = adapted(synthetic_model(**FAMILIES["qwen35-fused-qkv"]), tmp_path)
    with CpuTier() as cpu, CpuTier(definitions_only=True) as definitions:
        expected = generate(model, definitions, with_adapters(SHORT[1:]))
        assert_same(expected, generate(model, cpu, with_adapters(SHORT[1:])))
