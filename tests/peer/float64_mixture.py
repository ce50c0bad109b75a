"""Mixtures of experts in plain float64: glm4moe, minimax-m2, ernie4_5-moe, bailingmoe2, exaone-moe,
afmoe, hy_v3, mellum, smallthinker."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_dense import Float64Dense
from tests.peer.float64_lfm2 import chosen_by_bias
from tests.peer.float64_llama import Float64, Float64Llama, log_softmax, sigmoid, silu


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
        bare = name.removesuffix(".bias")
        return self._matrix(bare if bare in self._tensors else name).reshape(-1)


class Float64Windowed(Float64Dense):
    """Mellum 2, and SmallThinker, whose experts are chosen by what their layer reads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.first = self.architecture == "smallthinker"
        self.windowed_step = 4 if self.window else 0

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        self.chosen_by = x
        return super()._layer(x, layer, positions)

    def _feed_forward(self, h: Float64, layer: int) -> Float64:
        prefix = f"blk.{layer}.ffn_"
        chosen_by = self.chosen_by if self.first else h
        return self._experts(h, self._linear(chosen_by, f"{prefix}gate_inp"), prefix)

    def activation(self, x: Float64) -> Float64:
        """Nothing below 0, or SiLU."""
        return np.maximum(x, 0.0) if self.first else silu(x)

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        if not self.first:
            return super()._weights(logits, prefix)
        used = np.argsort(-logits, axis=-1, kind="stable")[:, : self._key("expert_used_count")]
        return sigmoid(logits), used

    def _is_full(self, layer: int) -> bool:
        return bool(self.window) and layer % 4 == (0 if self.first else 3)

    def _window(self, layer: int) -> int | None:
        return None if self._is_full(layer) else self.window or None

    def _turn_layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        if self.first and self._is_full(layer):
            return x
        factor = self._key("rope.scaling.factor", 1.0) if self._is_full(layer) else 1.0
        return super()._turn_layer(x, layer, positions / factor)


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
