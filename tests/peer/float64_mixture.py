"""Mixtures of experts in plain float64: glm4moe, minimax-m2."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_lfm2 import chosen_by_bias
from tests.peer.float64_llama import Float64, Float64Llama


class Float64Mixture(Float64Llama):
    """Sigmoids weight experts, times a factor, and a bias takes part in their choice."""

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        bias = self._choice_bias(prefix.replace("ffn_", "exp_probs_b.bias"))
        return chosen_by_bias(logits, bias, self._key("expert_used_count"))

    def _choice_bias(self, name: str) -> Float64:
        return self._matrix(name).reshape(-1)
