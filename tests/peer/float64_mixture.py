"""Mixtures of experts in plain float64: glm4moe."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_lfm2 import chosen_by_bias
from tests.peer.float64_llama import Float64, Float64Llama


class Float64Mixture(Float64Llama):
    """Sigmoids weight experts, times a factor, and a bias takes part in their choice."""

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm"), layer, positions)
        return x + self._feed_forward(self._norm(x, f"blk.{layer}.post_attention_norm"), layer)

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        bias = self._matrix(prefix.replace("ffn_", "exp_probs_b.bias")).reshape(-1)
        return chosen_by_bias(logits, bias, self._key("expert_used_count"))
