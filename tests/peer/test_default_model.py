"""The default model: close to llama.cpp, and closer than it to float64 with the same weights."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from harness.bench.engines import peer_version
from reference.model.open import open_model
from tests.peer.float64_llama import Float64Llama, log_softmax
from tests.peer.llama_cpp_peer import GGML_TYPE_F16, GGML_TYPE_F32
from tests.peer.our_engine import our_logits
from tests.peer.texts import PASSAGE

pytestmark = pytest.mark.peer

FIGURES_ENV = "ZINC_RT_PEER_FIGURES"
"""Names a file the figures are written to."""
MIN_POSITIONS = 256
AT_ONCE = 64
"""Positions whose logits are compared at once."""
PEER_KV = {"f32": GGML_TYPE_F32, "f16": GGML_TYPE_F16}
Logits = Callable[[str], tuple[np.ndarray, np.ndarray]]


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


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) of each position, of logarithms of probabilities."""
    found: np.ndarray = (np.exp(p) * (p - q)).sum(axis=-1)
    return found


def same_top1(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether the likeliest token of each position is the same."""
    found: np.ndarray = a.argmax(axis=1) == b.argmax(axis=1)
    return found


def largest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The largest difference of each position."""
    found: np.ndarray = np.abs(a - b).max(axis=1)
    return found


def measured(truth: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Six figures of which the mean counts, and three of which the largest does, a row a
    position."""
    true_logs, our_logs, their_logs = map(log_softmax, (truth, ours, theirs))
    return np.stack(
        [
            kl(true_logs, our_logs), kl(true_logs, their_logs), kl(our_logs, their_logs),
            same_top1(ours, theirs), same_top1(ours, truth), same_top1(theirs, truth),
            largest(ours, truth), largest(theirs, truth), largest(ours, theirs),
        ],
        axis=1,
    )  # fmt: skip


def figures_of(kv: str, rows: np.ndarray) -> Figures:
    means, maxima = rows[:, :6].mean(axis=0).tolist(), rows[:, 6:].max(axis=0).tolist()
    ratio = means[1] / means[0]
    return Figures(peer_version(), kv, len(rows), *means[:3], ratio, *means[3:], *maxima)


@pytest.fixture(scope="module")
def tokens(default_model_path) -> list[int]:
    """Those of a passage of text."""
    model = open_model(default_model_path)
    with model.file:
        return list(model.tokenizer.encode(PASSAGE))


@pytest.fixture(scope="module")
def logits(default_model_path, peer, tokens) -> Logits:
    """By KV type: ours, and those of llama.cpp."""

    @cache
    def of(kv: str) -> tuple[np.ndarray, np.ndarray]:
        ours = our_logits(default_model_path, tokens, kv, tier="native")
        return ours, peer.logits(default_model_path, tokens, PEER_KV[kv])

    return of


@pytest.fixture(scope="module")
def figures(default_model_path, tokens, logits) -> dict[str, Figures]:
    """By KV type; printed, and written where ``ZINC_RT_PEER_FIGURES`` says. Binary64 logits of all
    positions at once would take gigabytes."""
    oracle = Float64Llama(default_model_path)
    states = oracle.states(tokens)
    parts: dict[str, list[np.ndarray]] = {kv: [] for kv in PEER_KV}
    for rows in parts_of(len(tokens)):
        truth = oracle.head(states[rows])
        for kv, found in parts.items():
            found.append(measured(truth, *(each[rows] for each in logits(kv))))
    figures = {kv: figures_of(kv, np.concatenate(rows)) for kv, rows in parts.items()}
    text = json.dumps([asdict(figure) for figure in figures.values()], indent=1)
    print(text)
    if os.environ.get(FIGURES_ENV):
        Path(os.environ[FIGURES_ENV]).write_text(text + "\n")
    return figures


def parts_of(positions: int) -> list[slice]:
    """All positions, AT_ONCE of them in each part."""
    return [slice(start, start + AT_ONCE) for start in range(0, positions, AT_ONCE)]


@pytest.mark.parametrize("kv", ["f32", pytest.param("f16", marks=pytest.mark.long)])
def test_llama_cpp_agrees(logits, kv):
    """0.963 of the likeliest tokens are equal here; llama.cpp rounds otherwise elsewhere."""
    ours, theirs = logits(kv)
    assert len(ours) >= MIN_POSITIONS
    assert same_top1(ours, theirs).mean() >= 0.93
    logs = ((log_softmax(ours[rows]), log_softmax(theirs[rows])) for rows in parts_of(len(ours)))
    assert np.concatenate([kl(*pair) for pair in logs]).mean() < 0.01


@pytest.mark.long
@pytest.mark.parametrize("kv", PEER_KV)
def test_ours_is_ten_times_closer_to_float64_than_llama_cpp(figures, kv):
    """Binary64 takes as long as all else here; each architecture is compared with it by itself."""
    assert figures[kv].kl_ratio >= 10


@pytest.mark.long
def test_ours_agrees_with_float64(figures):
    assert figures["f32"].top1_ours_float64 >= 0.99
    assert figures["f32"].kl_ours_from_float64 < 1e-3
