"""StarCoder 2, StableLM, Phi 2 and GPT-NeoX in plain float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_gemma import Float64Gemma
from tests.peer.float64_llama import Float64, Float64Llama


class Float64LayerNorms(Float64Llama):
    """Norms subtract the mean and have biases; a feed forward without gates has GELU."""

    epsilon = "attention.layer_norm_epsilon"

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        first, second = f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"
        h = self._norm(x, first)
        y = x + self._attention(h, layer, positions)
        if f"{second}.weight" in self._tensors:
            beside = self.architecture == "gptneox" and self._key("use_parallel_residual", True)
            h = self._norm(x if beside else y, second)
        return y + self._feed_forward(h, layer)

    def _gated(self, h: Float64, prefix: str, suffix: str = "") -> Float64:
        if f"{prefix}gate.weight" in self._tensors:
            return super()._gated(h, prefix, suffix)
        return self._linear(
            Float64Gemma.activation(self._linear(h, f"{prefix}up")), f"{prefix}down"
        )

    def _norm(self, x: Float64, name: str) -> Float64:
        return super()._norm(x, name) + self._matrix(f"{name}.bias").reshape(-1)

    def _normed(self, x: Float64) -> Float64:
        return super()._normed(x - x.mean(axis=-1, keepdims=True))

    def head(self, h: Float64) -> Float64:
        logits = super().head(h)
        if "output.bias" in self._tensors:
            logits = logits + self._matrix("output.bias").reshape(-1)
        return logits
