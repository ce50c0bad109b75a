"""Mixtures of experts in plain float64: glm4moe, minimax-m2, ernie4_5-moe, bailingmoe2, exaone-moe,
afmoe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_dense import Float64Dense
from tests.peer.float64_lfm2 import chosen_by_bias
from tests.peer.float64_llama import Float64, Float64Llama, log_softmax, sigmoid


class Float64Mixture(Float64Llama):
    """Sigmoids weight experts, times a factor, and a bias takes part in their choice."""

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        bias = self._choice_bias(prefix.replace("ffn_", "exp_probs_b.bias"))
        return chosen_by_bias(logits, bias, self._key("expert_used_count"))

    def _choice_bias(self, name: str) -> Float64:
        return self._matrix(name).reshape(-1)


class Float64Ernie(Float64Mixture):
    """A softmax weights experts."""

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        p = np.exp(log_softmax(logits))
        bias = self._choice_bias(prefix.replace("ffn_", "exp_probs_b.bias"))
        used = np.argsort(-(p + bias), axis=-1, kind="stable")
        return p, used[:, : self._key("expert_used_count")]


class Float64Grouped(Float64Dense):
    """Experts of the best groups, chosen by the sigmoid and a bias."""

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        bias = self._choice_bias(prefix.replace("ffn_", "exp_probs_b.bias"))
        score = of_best_groups(
            sigmoid(logits) + bias,
            self._key("expert_group_count", 1),
            self._key("expert_group_used_count", 1),
        )
        used = np.argsort(-score, axis=-1)[:, : self._key("expert_used_count")]
        return sigmoid(logits), used

    def _choice_bias(self, name: str) -> Float64:
        return self._matrix(name).reshape(-1)


class Float64Routed(Float64Grouped):
    """The same; all but every fourth layer have windows and rotate, where some have windows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.windowed_step = self.unrotated_step = 4 if self.window else 0
        self.normalized = self._key("expert_weights_norm", False)
        if self.architecture == "afmoe":
            self.embedding_scale = self.hidden**0.5


def of_best_groups(score: Float64, groups: int, used: int) -> Float64:
    """Scores of experts, minus infinity outside the groups with the largest sums of two."""
    best = score.copy()
    of_group = np.sort(score.reshape(len(score), groups, -1), axis=-1)[..., -2:].sum(axis=-1)
    worst = np.argsort(-of_group, axis=-1)[:, used:]
    size = score.shape[1] // groups
    for token, group in np.argwhere(np.ones_like(worst)):
        begin = worst[token, group] * size
        best[token, begin : begin + size] = -np.inf
    return best
