"""Requests with LoRA adapters beside requests without: the bits of the CPU tier on every tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract.tier import Tier
from contract.types import Request
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model
from tests.adapters import write_adapter
from tests.conftest import SyntheticModel
from tests.families_table import FAMILIES
from tests.model_runs import FEW, SHORT, Outcome, assert_same, compare, generate
from tests.tiers.ways import WAYS

CHOICES = (((0, 1.0),), (), ((1, -0.7), (0, 0.3)), ((1, 1.5),))
"""One adapter, none, two, the other one."""


def adapted(path: Path, folder: Path) -> Model:
    """The model with an adapter of all projections, and one of rank 20 of some."""
    first = write_adapter(folder / "first.gguf", path, rank=4)
    some = {"attn_v", "ffn_down", "attn_qkv"}
    second = write_adapter(
        folder / "second.gguf", path, rank=20, seed=2, changed=lambda n: n.split(".")[-2] in some
    )
    return open_model(path, (first, second))


def with_adapters(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    return tuple(
        replace(request, adapters=chosen)
        for request, chosen in zip(requests, CHOICES, strict=False)
    )


def test_cpu(synthetic_model: SyntheticModel, tmp_path: Path) -> None:
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    model = adapted(path, tmp_path)
    requests = with_adapters(SHORT)
    with CpuTier() as cpu, CpuTier(definitions_only=True) as defs:
        mixed = generate(model, cpu, requests)
        assert_same(mixed, generate(model, defs, requests))
        plain = generate(open_model(path), cpu, SHORT)
        for request in SHORT:
            same = all(np.array_equal(a, b) for a, b in zip(mixed[1][request.id], plain[1][request.id]))
            print(request.id, same)


@pytest.mark.parametrize("way", ["native", "opencl", "vulkan", "metal-simulated", "amd-kfd"], indirect=True, scope="module")
def test_ways(tier: Tier, synthetic_model: SyntheticModel, tmp_path: Path) -> None:
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    requests = WAYS[tier.info.name].requests if tier.info.name in WAYS else FEW
    compare(adapted(path, tmp_path), tier, requests=with_adapters(requests))
