"""Outlier channels of keys are found from the weights of a file and divided away exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.opcodes import Opcode
from reference.limits import Limits
from reference.model import open as opening
from reference.model.config import Rope
from reference.model.families.smooth_keys import _pair_of_channel, _powers, smoothing_powers
from reference.model.open import Model, open_model
from tests.peer.float64_llama import mean_kl
from tests.peer.float64_model import float64_model
from tests.peer.our_engine import our_logits

TOKENS = np.random.default_rng(1).integers(0, 300, 64).tolist()
LIMITS = Limits(slots=1, context=64, pages=4)
GEMMA4 = {"window": 32, "shared_kv_layers": 2}


def powers_of(path: Path) -> dict[int, Any]:
    """The exponents of a file's layers."""
    model = open_model(path)
    found = smoothing_powers(model.config, model.file)
    model.close()
    return found


@pytest.mark.parametrize(
    ("fields", "outlier", "gain"),
    [
        ({"architecture": "qwen2"}, 100.0, 5),
        ({"architecture": "qwen2", "fused_qkv": True, "quant": "q8_0"}, 30.0, 2),
        ({"architecture": "qwen3"}, 100.0, 5),
        ({"architecture": "gemma4", "layers": 6, "gemma": GEMMA4}, 20.0, 2),
    ],
    ids=["biases", "fused biases", "norms", "shared pages"],
)
def test_outliers_cost_less(synthetic_model, monkeypatch, fields, outlier, gain):
    """Divergence from binary64, in nats, with the powers and without."""
    path = synthetic_model(key_outliers=outlier, seed=3, **fields)
    assert powers_of(path)
    truth = float64_model(path).logits(TOKENS)
    smoothed = mean_kl(truth, our_logits(path, TOKENS))
    monkeypatch.setattr(opening, "smoothing_powers", lambda config, file: {})
    plain = mean_kl(truth, our_logits(path, TOKENS))
    assert smoothed * gain < plain


def test_norms_over_all_heads_take_the_powers_of_each(synthetic_model):
    """OLMo 2 norms all queries at once: a head's powers scale its part of the weights."""
    graph, _ = graph_with_outliers(synthetic_model(architecture="olmo2", key_outliers=100.0))
    plain, _ = graph_with_outliers(synthetic_model(architecture="olmo2"))
    assert [node.name for node in graph.nodes] == [node.name for node in plain.nodes]
    for name in ("attn_k_norm", "attn_q_norm"):
        assert "*" in graph.buffers[f"model.{name}.weight[0]"].source


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "qwen35"])
def test_ordinary_channels_are_left_alone(synthetic_model, architecture):
    """No weight is scaled and no op added where no channel stands out."""
    path = synthetic_model(architecture=architecture)
    assert powers_of(path) == {}
    graph = open_model(path).graph(LIMITS)
    assert not any("*" in decl.source for decl in graph.buffers.values())


def graph_with_outliers(path: Path) -> tuple[Any, Model]:
    """The graph, which the model keeps open."""
    model = open_model(path)
    return model.graph(LIMITS), model


def test_norms_take_the_powers_for_nothing(synthetic_model):
    """The same nodes; the weights of both norms of a head are scaled, oppositely."""
    graph, _ = graph_with_outliers(synthetic_model(architecture="qwen3", key_outliers=100.0))
    plain, _ = graph_with_outliers(synthetic_model(architecture="qwen3"))
    assert [node.name for node in graph.nodes] == [node.name for node in plain.nodes]
    for layer in range(2):
        keys = graph.buffers[f"model.attn_k_norm.weight[{layer}]"].source
        queries = graph.buffers[f"model.attn_q_norm.weight[{layer}]"].source
        assert "-4x1" in keys
        assert queries == keys.replace("k_norm", "q_norm").replace("-4", "4")


def test_biased_projections_are_scaled_before_they_are_rotated(synthetic_model):
    """One op more for queries and for keys, none for values."""
    graph, _ = graph_with_outliers(synthetic_model(architecture="qwen2", key_outliers=100.0))
    scaled = [node.name for node in graph.nodes if node.opcode is Opcode.SCALE_COLUMNS]
    assert scaled == [f"attn_{side}_smoothed[{n}]" for n in range(2) for side in "qk"]


def test_fused_projections_have_the_same_powers(synthetic_model):
    fields = {"architecture": "qwen2", "key_outliers": 50.0}
    assert powers_of(synthetic_model(**fields)) == powers_of(
        synthetic_model(fused_qkv=True, **fields)
    )


def test_scaled_weights_are_the_file_s_times_the_powers(synthetic_model):
    """Exactly, and nothing else changes."""
    path = synthetic_model(architecture="qwen3", key_outliers=100.0)
    model = open_model(path)
    (powers, *_) = smoothing_powers(model.config, model.file).values()
    stored = model.file.tensor_array("blk.0.attn_k_norm.weight")
    scaled = np.ldexp(stored, np.array(powers.keys))
    assert (np.flatnonzero(scaled != stored) % 32).tolist() == [3, 5, 3, 5]
    assert (np.ldexp(scaled, -np.array(powers.keys)) == stored).all()
    model.close()


@pytest.mark.parametrize("neox", [True, False])
def test_rotated_pairs_share_their_power(neox):
    """The channels that are not rotated have powers of their own."""
    rope = Rope("t", 10000.0, 8, neox, scaling=None)  # type: ignore[arg-type]
    pairs = _pair_of_channel(rope, 12)
    expected = [0, 1, 2, 3] * 2 if neox else [0, 0, 1, 1, 2, 2, 3, 3]
    assert pairs.tolist() == [*expected, 8, 9, 10, 11]
    keys = np.ones(12, np.float32)
    keys[1], keys[10] = 100.0, -0.0
    powers = _powers(np.ones(12, np.float32), np.abs(keys), pairs)
    outliers = {n for n, power in enumerate(powers) if power}
    assert outliers == ({1, 5} if neox else {0, 1})


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_broken_parameters_are_left_alone(synthetic_model, poison):
    """They break the logits as they did."""
    path = synthetic_model(architecture="qwen3", key_outliers=poison)
    assert powers_of(path) == {}
