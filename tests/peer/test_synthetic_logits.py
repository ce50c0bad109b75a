"""On binary32 weights nothing is rounded on purpose, so three engines agree closely."""

from __future__ import annotations

import numpy as np
import pytest

from tests.families_table import FAMILIES, GEMMAS
from tests.peer.float64_gemma import Float64Gemma
from tests.peer.float64_model import float64_model
from tests.peer.llama_cpp_peer import peer_logits
from tests.peer.our_engine import our_logits

pytestmark = pytest.mark.peer

POSITIONS = 100
CHUNK = 48
"""Chunks of 48 do not line up with the attention tiles of 64; pages are 16."""
TOLERANCE = 1e-4
GELU_TABLE_TOLERANCE = 5e-3
"""llama.cpp's GELU goes through a table of binary16 values, in and out."""

NOT_IN_PEER = ("llama-per-layer-widths",)
"""llama.cpp takes the first layer's width for all layers of a llama."""
NOT_IN_FLOAT64 = ("llama-linear", "llama-yarn")
"""The float64 forward pass of these has no rotary scaling."""


def random_tokens(vocab: int) -> list[int]:
    return np.random.default_rng(7).integers(0, min(vocab, 256), POSITIONS).tolist()


def peer_tolerance(name: str) -> float:
    return GELU_TABLE_TOLERANCE if name in GEMMAS else TOLERANCE


@pytest.fixture
def model(synthetic_model):
    """``model(name)``: the file of a table entry, and the tokens it is asked about."""

    def write(name: str, **changed):
        path = synthetic_model(quant="f32", seed=11, **{**FAMILIES[name], **changed})
        return path, random_tokens(FAMILIES[name].get("vocab", 320))

    return write


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_PEER])
def test_logits_agree_with_llama_cpp(model, name):
    path, tokens = model(name)
    ours = our_logits(path, tokens, chunk=CHUNK)
    peer = peer_logits(path, tokens, chunk=CHUNK)
    assert ours.shape == peer.shape
    assert np.abs(ours - peer).max() <= peer_tolerance(name)
    assert ours.std() > 0.1


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_FLOAT64])
def test_logits_agree_with_float64(model, name):
    path, tokens = model(name)
    truth = float64_model(path).logits(tokens)
    assert np.abs(our_logits(path, tokens, chunk=CHUNK) - truth).max() <= TOLERANCE


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in NOT_IN_PEER + NOT_IN_FLOAT64]
)
def test_llama_cpp_agrees_with_float64(model, name):
    """The files and the oracle are right whatever our engine computes."""
    path, tokens = model(name)
    truth = float64_model(path).logits(tokens)
    assert np.abs(peer_logits(path, tokens, chunk=CHUNK) - truth).max() <= peer_tolerance(name)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-experts"])
def test_the_gelu_table_is_what_sets_llama_cpp_apart(model, monkeypatch, name):
    """With GELU rounded to binary16 on both sides the oracle comes closer to llama.cpp."""
    path, tokens = model(name)
    peer = peer_logits(path, tokens, chunk=CHUNK)
    exact = np.abs(float64_model(path).logits(tokens) - peer).mean()
    gelu = Float64Gemma.activation

    def table(x):
        rounded = x.astype(np.float16).astype(np.float64)
        return gelu(rounded).astype(np.float16).astype(np.float64)

    monkeypatch.setattr(Float64Gemma, "activation", staticmethod(table))
    rounded = np.abs(float64_model(path).logits(tokens) - peer).mean()
    assert rounded < exact / 3


def spoil_pairs(oracle):
    oracle.architecture = "qwen2"


def spoil_heads(oracle):
    oracle.grouped = True


def spoil_window(oracle):
    oracle.windows = [None if window is None else window + 1 for window in oracle.windows]


def spoil_donor(oracle):
    donor = oracle._donor
    oracle._donor = lambda layer: 0 if layer > 1 == donor(layer) else donor(layer)


def spoil_rotation(oracle):
    oracle.rope_dims = oracle.head_dim


def spoil_chosen_experts(oracle):
    key = oracle._key
    oracle._key = lambda name, *default: key(name, *default) - (name == "expert_used_count")


FAULTS = {
    "interleaved pairs taken for halves": ("llama", spoil_pairs),
    "key heads tiled for grouped": ("qwen35", spoil_heads),
    "a window one position too wide": ("gemma3", spoil_window),
    "the keys of an earlier windowed layer": ("gemma4-shared-kv", spoil_donor),
    "every channel rotated": ("qwen35moe", spoil_rotation),
    "one expert too few": ("qwen3moe", spoil_chosen_experts),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_formula_is_far_off(model, fault):
    """Negative control: the tolerances separate right from wrong."""
    name, spoil = FAULTS[fault]
    path, tokens = model(name)
    oracle = float64_model(path)
    right = oracle.logits(tokens)
    spoil(oracle)
    assert np.abs(oracle.logits(tokens) - right).max() > 20 * peer_tolerance(name)
