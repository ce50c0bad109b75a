"""The default model: close to llama.cpp, and closer than it to float64 with the same weights."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest

from harness.bench.engines import peer_version
from reference.model.open import open_model
from tests.peer.float64_llama import Float64Llama, log_softmax, mean_kl_of_logs
from tests.peer.llama_cpp_peer import GGML_TYPE_F16, GGML_TYPE_F32, Peer
from tests.peer.our_engine import our_logits
from tests.peer.texts import PASSAGE

pytestmark = pytest.mark.peer

FIGURES_ENV = "ZINC_RT_PEER_FIGURES"
"""Names a file the figures are written to."""
MIN_POSITIONS = 256
PEER_KV = {"f32": GGML_TYPE_F32, "f16": GGML_TYPE_F16}


@dataclass(frozen=True)
class Figures:
    """KL in nats, averaged over positions; differences are of logits."""

    peer: str
    kv: str
    positions: int
    kl_ours_from_float64: float
    kl_peer_from_float64: float
    kl_peer_from_ours: float
    kl_ratio: float
    top1_ours_peer: float
    top1_ours_float64: float
    top1_peer_float64: float
    max_logit_difference_ours_float64: float
    max_logit_difference_peer_float64: float
    max_logit_difference_ours_peer: float


def top1(a: np.ndarray, b: np.ndarray) -> float:
    """Share of positions with the same likeliest token."""
    return float((a.argmax(axis=1) == b.argmax(axis=1)).mean())


def largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def measure(
    peer: Peer, path: Path, kv: str, tokens: list[int], truth: np.ndarray, true_logs: np.ndarray
) -> Figures:
    ours = our_logits(path, tokens, kv_dtype=kv)
    theirs = peer.logits(path, tokens, PEER_KV[kv])
    our_logs, their_logs = log_softmax(ours), log_softmax(theirs)
    kl_ours = mean_kl_of_logs(true_logs, our_logs)
    kl_peer = mean_kl_of_logs(true_logs, their_logs)
    return Figures(
        peer=peer_version(),
        kv=kv,
        positions=len(tokens),
        kl_ours_from_float64=kl_ours,
        kl_peer_from_float64=kl_peer,
        kl_peer_from_ours=mean_kl_of_logs(our_logs, their_logs),
        kl_ratio=kl_peer / kl_ours,
        top1_ours_peer=top1(ours, theirs),
        top1_ours_float64=top1(ours, truth),
        top1_peer_float64=top1(theirs, truth),
        max_logit_difference_ours_float64=largest(ours, truth),
        max_logit_difference_peer_float64=largest(theirs, truth),
        max_logit_difference_ours_peer=largest(ours, theirs),
    )


@pytest.fixture(scope="module")
def figures(default_model_path, peer) -> dict[str, Figures]:
    """By KV type; printed, and written where ``ZINC_RT_PEER_FIGURES`` says."""
    model = open_model(default_model_path)
    tokens = model.tokenizer.encode(PASSAGE)
    model.file.close()
    truth = Float64Llama(default_model_path).logits(tokens)
    logs = log_softmax(truth)
    found = {kv: measure(peer, default_model_path, kv, tokens, truth, logs) for kv in PEER_KV}
    text = json.dumps([asdict(figure) for figure in found.values()], indent=1)
    print(text)
    if os.environ.get(FIGURES_ENV):
        Path(os.environ[FIGURES_ENV]).write_text(text + "\n")
    return found


@pytest.mark.parametrize("kv", PEER_KV)
def test_llama_cpp_agrees(figures, kv):
    assert figures[kv].positions >= MIN_POSITIONS
    assert figures[kv].top1_ours_peer >= 0.95
    assert figures[kv].kl_peer_from_ours < 0.01


@pytest.mark.parametrize("kv", PEER_KV)
def test_ours_is_ten_times_closer_to_float64_than_llama_cpp(figures, kv):
    assert figures[kv].kl_ratio >= 10


def test_ours_agrees_with_float64(figures):
    assert figures["f32"].top1_ours_float64 >= 0.99
    assert figures["f32"].kl_ours_from_float64 < 1e-3
