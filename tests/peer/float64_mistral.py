"""Ministral 3 in plain float64."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_dense import Float64Dense
from tests.peer.float64_llama import Float64, attention
from tests.peer.yarn import yarn_frequencies


class Float64Mistral(Float64Dense):
    """YaRN that leaves sizes alone, and queries that grow with every original context."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.interleaved = True
        self.factor = self._key("rope.scaling.factor")
        self.trained = self._key("rope.scaling.original_context_length")

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count, size = f"blk.{layer}.attn_", len(h), self.head_dim
        q, k, v = (self._linear(h, prefix + name).reshape(count, -1, size) for name in "qkv")
        frequency = yarn_frequencies(self.rope_base, self.rope_dims, self.factor, self.trained)
        growth, shrinking = (
            1 + 0.1 * multiplier * np.log(self.factor)
            for multiplier in (1.0, self._key("rope.scaling.yarn_log_multiplier"))
        )
        angle = positions[:, None, None] * frequency
        q, k = (growth / shrinking * self._turned(x, angle) for x in (q, k))
        passed = np.log1p(positions // self.trained)[:, None, None]
        q = q * (1 + self._key("attention.temperature_scale") * passed)
        return self._linear(attention(q, k, v, positions, size**-0.5), f"{prefix}output")
