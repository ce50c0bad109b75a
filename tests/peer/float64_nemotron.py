"""Nemotron-H and Nemotron 3 in plain float64: every layer is one block."""

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_granite_hybrid import Float64GraniteHybrid
from tests.peer.float64_lfm2 import chosen_by_bias
from tests.peer.float64_llama import Float64


class Float64Nemotron(Float64GraniteHybrid):
    """Mamba-2, attention without rotation, or the square of what is positive."""

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix = f"blk.{layer}."
        h = self._norm(x, f"{prefix}attn_norm")
        feeds = f"{prefix}ffn_up.weight" in self._tensors
        if feeds or f"{prefix}ffn_up_exps.weight" in self._tensors:
            return x + self._feed_forward(h, layer)
        return x + self._attention(h, layer, positions)

    def _feed_forward(self, h: Float64, layer: int) -> Float64:
        prefix = f"blk.{layer}.ffn_"
        if f"{prefix}gate_inp.weight" not in self._tensors:
            return self._squared(h, prefix)
        routed = self._experts(h, self._linear(h, f"{prefix}gate_inp"), prefix)
        return routed + self._squared(h, prefix, "_shexp")

    def _squared(self, h: Float64, prefix: str, suffix: str = "") -> Float64:
        positive = self.positive(self._linear(h, f"{prefix}up{suffix}"))
        return self._linear(positive**2, f"{prefix}down{suffix}")

    def _expert(self, x: Float64, expert: int, prefix: str) -> Float64:
        up, down = (self._matrix(f"{prefix}{name}_exps.weight")[expert] for name in ("up", "down"))
        return self.positive(x @ up.T) ** 2 @ down.T

    @staticmethod
    def positive(x: Float64) -> Float64:
        return np.maximum(x, 0.0)

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        bias = self._choice_bias(prefix.replace("ffn_", "exp_probs_b.bias"))
        return chosen_by_bias(logits, bias, self._key("expert_used_count"))

    def _choice_bias(self, name: str) -> Float64:
        return self._vector(name)
