"""Heads: llama.cpp reads the same files and computes the same formulas."""

import numpy as np
import pytest

from tests.engine.headed_models import head_of
from tests.engine.test_draft_formulas import BLOCKS, HEADS, path_of, truth_of

pytestmark = pytest.mark.peer
TOKENS = [i * 7 % 250 for i in range(40)]
TOLERANCE = 4e-5


@pytest.mark.parametrize("name", [name for name in HEADS if name not in BLOCKS])
def test_llama_cpp_agrees_with_float64(synthetic_model, peer, name):
    """It leaves the first token out, of which the formulas have no row before."""
    path = path_of(synthetic_model, name)
    head, truth = head_of(path), truth_of(path, name)
    assert head is not None
    features, logits = peer.head_logits(path, head, TOKENS, truth.read_layers)
    expected = truth.draft_logits(TOKENS, first_key=False)
    owned = np.flatnonzero(np.isfinite(logits).all(axis=0))
    assert len(owned) == expected.shape[1]
    assert np.abs(features - truth.features(TOKENS)).max() < TOLERANCE
    assert np.abs(logits[:, owned] - expected).max() < TOLERANCE
    assert np.abs(logits[:, owned] - truth.draft_logits(TOKENS)[1:]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", BLOCKS)
def test_llama_cpp_agrees_with_float64_on_blocks(synthetic_model, peer, name):
    """The rows of the model, and a block without keys of them. Its rows have windows of their own,
    not that of the block's last row."""
    path = path_of(synthetic_model, name)
    head, truth = head_of(path), truth_of(path, name)
    assert head is not None
    block = [TOKENS[-1], *[truth.mask] * 5]
    joined, logits = peer.block_logits(path, head, TOKENS[:-1], truth.read_layers, block)
    expected = truth.block_logits(TOKENS, 5, kept=False, own_windows=True)
    owned = np.flatnonzero(np.isfinite(logits).all(axis=0))
    assert len(owned) == expected.shape[1]
    assert np.abs(joined - truth.joined(TOKENS)[:-1]).max() < TOLERANCE
    assert np.abs(logits[1:, owned] - expected).max() < TOLERANCE
    causal = truth.block_logits(TOKENS, 5, kept=False, causal=True, own_windows=True)
    assert np.abs(logits[1:, owned] - causal).max() > 100 * TOLERANCE
