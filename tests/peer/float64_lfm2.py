"""LFM 2 in plain float64: gated short convolutions between layers that attend."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_llama import Float64, Float64Llama, sigmoid


class Float64Lfm2(Float64Llama):
    """A layer without heads for keys and values convolves."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kv_heads_of = list(self.kv_heads)
        self.kv_heads = max(self.kv_heads_of)

    def logits(self, tokens: list[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens))
        for layer in range(self.layers):
            x = self._layer(x, layer, positions)
        return self.head(self._norm(x, "token_embd_norm"))

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        if self.kv_heads_of[layer]:
            return super()._layer(x, layer, positions)
        prefix = f"blk.{layer}."
        x = x + self._convolution(self._norm(x, f"{prefix}attn_norm"), f"{prefix}shortconv.")
        return x + self._feed_forward(self._norm(x, f"{prefix}ffn_norm"), layer)

    def _convolution(self, h: Float64, prefix: str) -> Float64:
        before, after, u = np.split(self._linear(h, f"{prefix}in_proj"), 3, axis=1)
        taps = self._matrix(f"{prefix}conv.weight")
        past = taps.shape[1] - 1
        padded = np.concatenate([np.zeros((past, u.shape[1])), before * u])
        mixed = sum(padded[i : i + len(u)] * taps[:, i] for i in range(past + 1))
        return self._linear(after * mixed, f"{prefix}out_proj")


class Float64Lfm2Moe(Float64Lfm2):
    """Sigmoids weight experts; a bias takes part in their choice alone."""

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        bias = self._choice_bias(prefix.replace("ffn_", "exp_probs_b.bias"))
        return chosen_by_bias(logits, bias, self._key("expert_used_count"))

    def _choice_bias(self, name: str) -> Float64:
        return self._matrix(name).reshape(-1)


def chosen_by_bias(logits: Float64, bias: Float64, count: int) -> tuple[Float64, NDArray[np.int64]]:
    """What weights each expert, and those of every row with the largest sum of it and a bias."""
    p = sigmoid(logits)
    return p, np.argsort(-(p + bias), axis=-1, kind="stable")[:, :count]
