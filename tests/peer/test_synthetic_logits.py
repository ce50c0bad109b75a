"""On binary32 weights nothing is rounded on purpose, so three engines agree closely."""

from __future__ import annotations

import numpy as np
import pytest

from tests.families_table import DENSE, FAMILIES
from tests.peer.float64_llama import Float64Llama
from tests.peer.llama_cpp_peer import peer_logits
from tests.peer.our_engine import our_logits

pytestmark = pytest.mark.peer

POSITIONS = 100
CHUNK = 48
"""Chunks of 48 do not line up with the attention tiles of 64; pages are 16."""
TOLERANCE = 1e-4

NOT_IN_PEER = ("llama-per-layer-widths",)
"""llama.cpp takes the first layer's width for all layers of a llama."""
NOT_IN_FLOAT64 = ("llama-linear", "llama-yarn")
"""The float64 forward pass has no rotary scaling."""


def random_tokens(vocab: int) -> list[int]:
    return np.random.default_rng(7).integers(0, min(vocab, 256), POSITIONS).tolist()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_PEER])
def test_logits_agree_with_llama_cpp(synthetic_model, name):
    path = synthetic_model(quant="f32", seed=11, **FAMILIES[name])
    tokens = random_tokens(FAMILIES[name].get("vocab", 320))
    ours = our_logits(path, tokens, chunk=CHUNK)
    peer = peer_logits(path, tokens, chunk=CHUNK)
    assert ours.shape == peer.shape
    assert np.abs(ours - peer).max() <= TOLERANCE
    assert ours.std() > 0.1


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_FLOAT64])
def test_logits_agree_with_float64(synthetic_model, name):
    path = synthetic_model(quant="f32", seed=11, **FAMILIES[name])
    tokens = random_tokens(FAMILIES[name].get("vocab", 320))
    truth = Float64Llama(path).logits(tokens)
    assert np.abs(our_logits(path, tokens, chunk=CHUNK) - truth).max() <= TOLERANCE


def test_a_wrong_pairing_of_rotary_channels_is_far_off(synthetic_model):
    """The tolerance separates right from wrong: interleaved pairs taken for halves."""
    path = synthetic_model(quant="f32", seed=11, **FAMILIES["llama"])
    tokens = random_tokens(320)
    oracle = Float64Llama(path)
    right = oracle.logits(tokens)
    assert oracle.architecture == "llama"
    oracle.architecture = "qwen2"
    assert np.abs(oracle.logits(tokens) - right).max() > 100 * TOLERANCE
