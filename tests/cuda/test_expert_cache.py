"""Experts that move between host memory and the device: the bits of resident ones at every moment,
on the double of the driver with the real kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accel.cuda import expert_cache
from accel.cuda.expert_cache import CachedLayer, ExpertCache, StackShape
from accel.cuda.tier import CudaTier
from contract.dtypes import I12
from contract.records import QUERY_TOKEN, SAMPLING
from contract.tier import Tier
from harness.synth import sized_spec, write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.cuda.fake_devices import EmulatedDevices
from tests.cuda.test_experts import SHAPE
from tests.cuda.test_multi_device import opened

LIMITS = Limits(2, 32, 4, I12, step_tokens=16, step_rows=2)
STEPS = (*range(5, 14), -1), *((token,) for token in (7, 200, 31, 90, 160, 44, 7, 200))
"""Tokens of each step: a prompt, whose products are of groups, and single ones."""
HELD = 3
"""Experts of a layer on the device."""
ONE_LAYER = [StackShape("gate", 4, 256), StackShape("down", 4, 512)]


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    path = folder / "many-experts.gguf"
    experts = {"count": 66, "used": 2, "width": 256}
    spec = {"architecture": "qwen3moe", **SHAPE, "layers": 2, "experts": experts}
    write_synthetic(path, sized_spec("tiny", quant="q4_k_m", **spec))
    return open_model(path)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice before every step, of experts that were used once."""
    monkeypatch.setattr(expert_cache, "STEPS", 1)
    monkeypatch.setattr(expert_cache, "LEAST_GAIN", 1.0)


def outcomes(model: Model, tier: Tier) -> list[tuple[int, bytes]]:
    """Token and logits of every step."""
    found, position = [], 0
    with ModelRunner(model, tier, LIMITS) as runner:
        for tokens in STEPS:
            query = np.zeros(len(tokens), QUERY_TOKEN)
            query["token"] = [abs(token) for token in tokens]
            query["position"] = position + np.arange(len(tokens))
            position += len(tokens)
            table = np.arange(LIMITS.pages, dtype=np.int32).reshape(LIMITS.slots, -1)
            rows = np.array([len(tokens) - 1], np.int32)
            given = StepInput(query, rows, np.zeros(1, SAMPLING), table, (LOGITS,))
            out = runner.step(given)
            found.append((int(out.token[0]), out.logits.tobytes()))
    return found


def cached(model: Model, folder: Path, late: bool) -> tuple[list[tuple[int, bytes]], int]:
    """The outcomes with a few experts on the device, and how many were moved there."""
    driver = EmulatedDevices(folder, 1)
    with opened(driver, "0") as tier:
        assert isinstance(tier, CudaTier)
        graph = model.graph(LIMITS)
        names = [n for n in tier.streamable(graph, LIMITS.largest) if "_exps" in n]
        nbytes = next(
            size
            for size in range(0, 1 << 24, 1 << 16)
            if _held(tier, model, names, size) == HELD
        )
        tier.stream(graph, names, nbytes)
        driver.contexts[0].late = late
        found = outcomes(model, tier)
        cache = tier._streamed.cache
        assert cache is not None
        assert all(len(set(layer.slots)) == HELD for layer in cache.layers)
        return found, cache.moved


def _held(tier: CudaTier, model: Model, names: list[str], size: int) -> int:
    from accel.cuda.streamed_weights import cached_stacks
    from accel.packets.weight_ring import ring_of

    ring = ring_of(model.graph(LIMITS), names, tier._device_bytes)
    return expert_cache.experts_held(cached_stacks(ring), size)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("late", [False, True])
def test_experts_move_and_no_bit_changes(model: Model, folder: Path, late: bool) -> None:
    found, moved = cached(model, folder, late)
    assert found == outcomes(model, CpuTier())
    assert moved > 0
