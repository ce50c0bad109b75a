"""StarCoder 2, StableLM, Phi 2, GPT-NeoX, Falcon, Nemotron 4 and OLMo in plain float64."""

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_dense import Float64Dense
from tests.peer.float64_gemma import Float64Gemma
from tests.peer.float64_llama import Float64


class CentredNorms(Float64Dense):
    """Norms subtract the mean, those of heads too."""

    epsilon = "attention.layer_norm_epsilon"

    def _norm_heads(self, x: Float64, name: str) -> Float64:
        weights = self._matrix(f"{name}.weight")
        return (self._normed(x.reshape(len(x), *weights.shape)) * weights).reshape(x.shape)

    def _normed(self, x: Float64) -> Float64:
        return super()._normed(x - self._mean(x))

    def _mean(self, x: Float64) -> Float64:
        mean: Float64 = x.mean(axis=-1, keepdims=True)
        return mean


class Float64LayerNorms(CentredNorms):
    """Norms subtract the mean and have biases, or no weights; a feed forward without gates has
    GELU, or squares what is positive."""

    def logits(self, tokens: list[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens))
        if self.positioned:
            x = x + self._rows("position_embd.weight", positions)
        for layer in range(self.layers):
            x = self._layer(x, layer, positions)
        return self.head(self._norm(x, "output_norm"))

    @property
    def positioned(self) -> bool:
        """Whether positions have embeddings, and heads do not rotate."""
        return "position_embd.weight" in self._tensors

    def _turn_layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        return x if self.positioned else super()._turn_layer(x, layer, positions)

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        first, second = f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"
        h = self._norm(x, first)
        own = f"{first}_2.weight" in self._tensors
        y = x + self._attention(self._norm(x, f"{first}_2") if own else h, layer, positions)
        if f"{second}.weight" in self._tensors or self.architecture == "olmo":
            beside = self.architecture == "gptneox" and self._key("use_parallel_residual", True)
            h = self._norm(x if beside else y, second)
        return y + self._feed_forward(h, layer)

    def _gated(self, h: Float64, prefix: str, suffix: str = "") -> Float64:
        if f"{prefix}gate.weight" in self._tensors:
            return super()._gated(h, prefix, suffix)
        up = self._linear(h, f"{prefix}up")
        if self.architecture in ("nemotron", "jais2"):
            return self._linear(self.positive(up) ** 2, f"{prefix}down")
        return self._linear(Float64Gemma.activation(up), f"{prefix}down")

    def _norm(self, x: Float64, name: str) -> Float64:
        if f"{name}.weight" not in self._tensors:
            return self._normed(x)
        return super()._norm(x, name) + self._matrix(f"{name}.bias").reshape(-1)

    def head(self, h: Float64) -> Float64:
        logits = super().head(h)
        if "output.bias" in self._tensors:
            logits = logits + self._matrix("output.bias").reshape(-1)
        return logits
