"""Experts and delta nets on a device: small models of every family that has them, against the CPU
tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda import expert_cache, expert_prompts
from accel.cuda.driver import open_driver
from accel.cuda.expert_cache import slot_bytes, table_bytes
from accel.cuda.runtime import Choices
from accel.cuda.streamed_weights import cached_stacks
from accel.cuda.tier import CudaTier
from accel.packets.weight_ring import ring_of
from contract.dtypes import I12
from contract.records import QUERY_TOKEN, SAMPLING
from contract.tier import Tier
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.cuda import test_delta_net, test_experts, test_selective_scan
from tests.needs import need_device

pytestmark = pytest.mark.device

SLOTS = 80
LIMITS = Limits(SLOTS, 96, SLOTS * 6, I12, step_tokens=96, step_rows=SLOTS)
MODELS: Mapping[str, Mapping[str, Any]] = {
    **{f"experts-{name}": fields for name, fields in test_experts.MODELS.items()},
    **{
        f"delta-{name}": {
            "architecture": "qwen35", **test_delta_net.SHAPE, "recurrent": {"interval": 2, **sizes}
        }
        for name, sizes in test_delta_net.MODELS.items()
        if name != "qwen3next"
    },
    **{
        f"scan-{name}": {"architecture": "mamba2", **test_delta_net.SHAPE, "mamba": sizes}
        for name, sizes in test_selective_scan.MODELS.items()
    },
    "both": {
        "architecture": "qwen35moe", **test_experts.SHAPE, "hidden": 1280, "layers": 4,
        "experts": {"count": 70, "used": 8, "width": 512, "shared_width": 512},
        "recurrent": {"state": 128, "key_heads": 2, "value_heads": 4},
    },
    "next": {
        "architecture": "qwen3next", **test_experts.SHAPE, "layers": 4,
        "experts": {"count": 260, "used": 4, "width": 256, "shared_width": 256},
        "recurrent": {"state": 64, "key_heads": 2, "value_heads": 6},
    },
}  # fmt: skip

Chunk = tuple[int, int, int]
"""A slot, its first position in the step and how many tokens."""
STEPS: Sequence[Sequence[Chunk]] = (
    [(0, 0, 1)],
    [(0, 1, 1)],
    [(0, 2, 1), (1, 0, 3)],
    [(1, 3, 1), (0, 3, 1), (2, 0, 1)],
    [(0, 4, 70), (3, 0, 9), (1, 4, 1)],
    [(slot, 0, 1) for slot in range(4, SLOTS)],
    [*((slot, 1, 1) for slot in range(6, 60)), (1, 5, 20)],
    [(0, 74, 5), (5, 1, 2), (3, 9, 1), (2, 1, 20)],
    [(0, 79, 1)],
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaTier]:
    need_device(open_driver)
    with CudaTier(choices=Choices(cache=tmp_path_factory.mktemp("cubins"))) as tier:
        yield tier


def logits(model: Model, tier: Tier) -> list[NDArray[np.float32]]:
    """Of every step, the last token of each chunk."""
    pages = np.arange(SLOTS * 6, dtype=np.int32).reshape(SLOTS, 6)
    found = []
    with ModelRunner(model, tier, LIMITS) as runner:
        for chunks in STEPS:
            query = np.zeros(sum(count for _, _, count in chunks), QUERY_TOKEN)
            ends = np.cumsum([count for _, _, count in chunks])
            for (slot, position, count), end in zip(chunks, ends, strict=True):
                own = query[end - count : end]
                own["slot"], own["position"] = slot, position + np.arange(count)
                own["token"] = (7 * own["position"] + slot) % 90
            rows = (ends - 1).astype(np.int32)
            step = StepInput(query, rows, np.zeros(len(rows), SAMPLING), pages, (LOGITS,))
            found.append(runner.step(step).logits.copy())
    return found


def stream(tier: CudaTier, model: Model, where: str) -> None:
    """Have the tier leave no weights, or all that it can, in host memory; all but two experts of a
    layer where some are ``cached``."""
    graph, cache = model.graph(LIMITS), 0
    names = [] if where == "resident" else list(tier.streamable(graph, LIMITS.largest))
    if where == "cached":
        layers = cached_stacks(ring_of(graph, names, tier._device_bytes))
        cache = table_bytes(layers) + 2 * sum(map(slot_bytes, layers))
    tier.stream(graph, names, cache)


@pytest.mark.parametrize("where", ["resident", "streamed", "cached"])
@pytest.mark.parametrize("quant", ["q4_k_m", "q5_k", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_bits_of_the_cpu(
    where: str,
    name: str,
    quant: str,
    folder: Path,
    opened: CudaTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token, a few, chunks of prompts beside tokens that decode, and many sequences."""
    monkeypatch.setattr(expert_cache, "STEPS", 1)
    monkeypatch.setattr(expert_cache, "MIN_GAIN", 0.0)
    compare(where, name, quant, folder, opened)


@pytest.mark.parametrize("where", ["resident", "cached"])
@pytest.mark.parametrize("quant", ["q4_k_m", "q5_k", "q6_k"])
@pytest.mark.parametrize("name", [name for name, fields in MODELS.items() if "experts" in fields])
def test_prompts_have_the_bits_of_the_cpu(
    where: str,
    name: str,
    quant: str,
    folder: Path,
    opened: CudaTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same where the largest step's experts are multiplied by groups of warps."""
    monkeypatch.setattr(expert_cache, "STEPS", 1)
    monkeypatch.setattr(expert_cache, "MIN_GAIN", 0.0)
    monkeypatch.setattr(expert_prompts, "SINGLE_WARP_TOKENS", 64)
    compare(where, name, quant, folder, opened)


def compare(where: str, name: str, quant: str, folder: Path, opened: CudaTier) -> None:
    """The logits of all steps with those of the CPU tier."""
    path = folder / f"on-device-{name}-{quant}.gguf"
    write_synthetic(path, sized_spec("tiny", quant=quant, **MODELS[name]))
    model = open_model(path)
    stream(opened, model, where)
    for number, (want, got) in enumerate(
        zip(logits(model, CpuTier()), logits(model, opened), strict=True)
    ):
        assert got.tobytes() == want.tobytes(), f"step {number}"
