"""Command R, R+ and R7B in plain float64."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_layer_norms import CentredNorms
from tests.peer.float64_llama import Float64


class Float64Cohere(CentredNorms):
    """Both blocks read one layer norm; of Command R7B every fourth layer neither has a window nor
    rotates."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.interleaved = True
        if self.window:
            self.windowed_step = self.unrotated_step = 4

    def logits(self, tokens: list[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens))
        for layer in range(self.layers):
            x = self._layer(x, layer, positions)
        return self.head(self._norm(x, "output_norm")) * self._key("logit_scale")

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        h = self._norm(x, f"blk.{layer}.attn_norm")
        return x + self._attention(h, layer, positions) + self._feed_forward(h, layer)
