"""Steps of one token, whose groups repeat small ops: every logit equals the CPU tier's."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.kernels.source import REPEATING_OPS
from accel.packets.fused import fuse
from accel.packets.repeated import MAX_SEGMENTS, repeat_small
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_levels
from accel.vulkan import tier as vulkan_tier
from contract.arithmetic import SEGMENT
from contract.dtypes import I12
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import Tier
from reference.cpu.tier import CpuTier
from reference.limits import whole_contexts
from reference.model.open import Model, open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.long_cases import long_except

SyntheticModel = Callable[..., Path]
CHUNK = 256


def names_of(model: Model, context: int = 128) -> Counter[str]:
    """How often a step of one token has each op."""
    graph = model.graph(whole_contexts(1, context, I12, 64, 1))
    step = repeat_small(fuse(lower_graph(graph, ShapeKey(1, 1), 128, "vulkan")))
    return Counter(op.name for op in step.ops)


def decoded(
    tier: Tier, model: Model, context: int, stops: Mapping[int, int]
) -> list[NDArray[np.float32]]:
    """Logits of so many steps of one token from each of ``stops`` on, prompts in chunks between."""
    limits = whole_contexts(1, context, I12, CHUNK, 1)
    pages = limits.slots * limits.slot_pages
    table = np.random.default_rng(2).permutation(pages).astype(np.int32)
    tokens = np.random.default_rng(1).integers(0, 200, context)
    found = []
    with ModelRunner(model, tier, limits) as runner:

        def step(first: int, count: int) -> NDArray[np.float32]:
            query = np.zeros(count, QUERY_TOKEN)
            query["token"] = tokens[first : first + count]
            query["position"] = np.arange(first, first + count)
            rows, sampling = np.array([count - 1], np.int32), np.zeros(1, SAMPLING)
            pages = table.reshape(limits.slots, -1)
            given = StepInput(query, rows, sampling, pages, (LOGITS,))
            return runner.step(given).logits.copy()

        done = 0
        for stop, count in stops.items():
            while done < stop:
                chunk = min(CHUNK, stop - done)
                step(done, chunk)
                done += chunk
            for _ in range(count):
                found.append(step(done, 1))
                done += 1
    return found


SHAPES: dict[str, dict[str, Any]] = {
    "norms": {"architecture": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 64},
    "seven-heads": {"architecture": "qwen2", "heads": 7, "kv_heads": 1, "head_dim": 32},
    "pairs": {"architecture": "llama", "heads": 3, "kv_heads": 3, "head_dim": 96},
    "wide": {"architecture": "qwen3", "heads": 2, "kv_heads": 1, "head_dim": 256},
}


@pytest.mark.parametrize("name", long_except(SHAPES, "norms", "seven-heads"))
def test_every_shape_of_heads(open_vulkan, synthetic_model, name):
    """From the first token over the ends of pages and of a tile; with norms and biases or without,
    rotations of either kind."""
    layers = 2 if name == "norms" else 1
    sizes = {"layers": layers, "hidden": 512, "feed_forward": 768, "vocab": 320}
    model = open_model(synthetic_model(quant="q4_k_m", **sizes, **SHAPES[name]))
    kernel = "flash_attn_row_wide" if name == "wide" else "flash_attn_row"
    assert names_of(model)[kernel] == layers
    stops = {0: 3, 14: 4, 62: 4, 130: 1}
    expected = decoded(CpuTier(), model, 256, stops)
    for requested, got in zip(expected, decoded(open_vulkan(), model, 256, stops), strict=True):
        assert np.isfinite(requested).all()
        assert (requested == got).all()


@pytest.mark.parametrize("hidden", [5120, 6656])
def test_activations_of_many_segments(open_vulkan, synthetic_model, hidden):
    """Nearly as many as a group has room for, and more: behind them is what makes them."""
    sizes = {"layers": 1, "hidden": hidden, "feed_forward": 256, "vocab": 320}
    model = open_model(synthetic_model(quant="q4_k_m", **sizes, **SHAPES["norms"]))
    assert names_of(model)["gate_row"] == (hidden <= MAX_SEGMENTS * SEGMENT)
    expected = decoded(CpuTier(), model, 64, {0: 2})
    got = decoded(open_vulkan(), model, 64, {0: 2})
    assert all((a == b).all() for a, b in zip(expected, got, strict=True))


def test_parts_of_several_tiles(open_vulkan, synthetic_model, monkeypatch):
    """Spans, where the context has more tiles than there are parts."""
    monkeypatch.setattr(vulkan_tier, "PARTS", 16)
    sizes = {"layers": 1, "hidden": 256, "feed_forward": 256, "vocab": 320}
    sizes |= {"heads": 2, "kv_heads": 1, "head_dim": 64}
    model = open_model(synthetic_model(architecture="qwen3", quant="q4_k_m", **sizes))
    stops = {1022: 4}
    expected = decoded(CpuTier(), model, 1152, stops)
    got = decoded(open_vulkan(), model, 1152, stops)
    assert all((a == b).all() for a, b in zip(expected, got, strict=True))


def test_a_layer_is_eight_launches(synthetic_model):
    """q, k and v; attention; its merge; output; gate and up; down: six waits instead of ten."""
    sizes = {"layers": 3, "hidden": 512, "feed_forward": 768, "vocab": 320}
    model = open_model(synthetic_model(quant="q4_k_m", **sizes, **SHAPES["norms"]))
    found = names_of(model)
    assert found["norm_row"] == 3 * 4 + 1
    assert found["gate_row"] == found["flash_attn_row"] == found["flash_attn_quantize"] == 3
    assert found["matmul_row"] == 3
    assert not {"rms_norm_quantize", "quantize_activation", "swiglu_quantize", "head_rows"} & {
        *found
    }
    graph = model.graph(whole_contexts(1, 128, I12, 64, 1))
    fused = fuse(lower_graph(graph, ShapeKey(1, 1), 128, "vulkan"))
    waits = [schedule_levels(step).barriers for step in (fused, repeat_small(fused))]
    assert waits[0] - waits[1] == 3 * 4 + 1


@pytest.mark.parametrize(
    ("tokens", "of_one_row"), [(2, {"norm_row": 1}), (60, {"norm_row": 3, "gate_row": 1})]
)
def test_steps_of_more_tokens_have_none(synthetic_model, tokens, of_one_row):
    """But for their one row of logits, and of 60 tokens for that row in the last layer."""
    model = open_model(synthetic_model(quant="q4_k_m"))
    graph = model.graph(whole_contexts(1, 128, I12, 64, 1))
    step = repeat_small(fuse(lower_graph(graph, ShapeKey(tokens, 1), 128, "vulkan")))
    found = Counter(op.name for op in step.ops if op.name in REPEATING_OPS)
    assert found <= Counter(of_one_row)
