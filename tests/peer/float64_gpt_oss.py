"""gpt-oss in plain float64."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_llama import Float64, Float64Llama
from tests.peer.yarn import yarn_frequencies

LIMIT, STEEPNESS = 7.0, 1.702


class Float64GptOss(Float64Llama):
    """Sinks, windows in every second layer, YaRN, experts with biases and a clamped gate."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.window = self._key("attention.sliding_window")
        self.windowed = [layer % 2 == 0 for layer in range(self.layers)]
        self.factor = self._key("rope.scaling.factor", 1.0)
        self.limit, self.one = LIMIT, 1.0

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix = f"blk.{layer}."
        x = x + self._attention(self._norm(x, f"{prefix}attn_norm"), layer, positions)
        h = self._norm(x, f"{prefix}post_attention_norm")
        return x + self._mixture(h, f"{prefix}ffn_")

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count = f"blk.{layer}.attn_", len(h)
        q, k, v = (
            self._linear(h, prefix + name).reshape(count, -1, self.head_dim) for name in "qkv"
        )
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        sinks = self._sinks(prefix)
        mixed = np.empty_like(q)
        for head in range(self.heads):
            kv_head = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(self.head_dim)
            distance = positions[:, None] - positions[None, :]
            far = distance >= self.window if self.windowed[layer] else False
            weight = np.where((distance < 0) | far, 0.0, np.exp(scores))
            total = weight.sum(axis=1, keepdims=True) + np.exp(sinks[head])
            mixed[:, head] = weight / total @ v[:, kv_head]
        return self._linear(mixed.reshape(count, -1), f"{prefix}output")

    def _sinks(self, prefix: str) -> Float64:
        return self._matrix(f"{prefix}sinks.weight").reshape(-1)

    def _rotated(self, x: Float64, positions: NDArray[np.int64]) -> Float64:
        pairs = self.rope_dims // 2
        frequency = float(self.rope_base) ** (-np.arange(pairs) / pairs)
        magnitude = 1.0
        if self.factor != 1.0:
            trained = self._key("rope.scaling.original_context_length")
            frequency = yarn_frequencies(self.rope_base, self.rope_dims, self.factor, trained)
            magnitude = 1 + 0.1 * np.log(self.factor)
        return magnitude * self._turned(x, positions[:, None, None] * frequency)

    def _mixture(self, h: Float64, prefix: str) -> Float64:
        """Each token alone: the softmax of its largest router logits weighs its experts."""
        logits = self._linear(h, f"{prefix}gate_inp")
        matrices = {
            name: (self._matrix(f"{prefix}{name}_exps.weight"), self._bias(prefix, name))
            for name in ("gate", "up", "down")
        }

        def product(x: Float64, name: str, expert: int) -> Float64:
            weight, bias = matrices[name]
            return weight[expert] @ x + bias[expert]

        y = np.zeros_like(h)
        for token, x in enumerate(h):
            chosen = np.argsort(-logits[token], kind="stable")[: self._key("expert_used_count")]
            weight = np.exp(logits[token, chosen])
            for expert, share in zip(chosen, weight / weight.sum(), strict=True):
                gate = np.minimum(product(x, "gate", expert), self.limit)
                up = np.clip(product(x, "up", expert), -self.limit, self.limit)
                gated = gate / (1 + np.exp(-STEEPNESS * gate)) * (up + self.one)
                y[token] += share * product(gated, "down", expert)
        return y

    def _bias(self, prefix: str, name: str) -> Float64:
        return self._matrix(f"{prefix}{name}_exps.bias")
