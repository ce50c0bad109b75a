"""Llama 4 in plain float64: chunks of attention, queries that grow, weighted inputs of experts."""

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_llama import Float64, Float64Llama, attention, sigmoid


class Float64Llama4(Float64Llama):
    """Every fourth layer sees all positions and does not rotate."""

    normed = True

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count, size = f"blk.{layer}.attn_", len(h), self.head_dim
        q, k, v = (part.reshape(count, -1, size) for part in self._qkv(h, prefix, self.heads))
        if (layer + 1) % 4 == 0:
            mixed = attention(q * self._growth(positions), k, v, positions, size**-0.5)
            return self._linear(mixed, f"{prefix}output")
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        if self.normed and self._key("expert_count") != 128:
            q, k = self._normed(q), self._normed(k)
        chunk = self._chunk()
        parts = [
            attention(q[cut], k[cut], v[cut], positions[cut] - start, size**-0.5)
            for start in range(0, count, chunk)
            for cut in [slice(start, start + chunk)]
        ]
        return self._linear(np.concatenate(parts), f"{prefix}output")

    def _chunk(self) -> int:
        return self._key("attention.sliding_window", 8192)

    def _growth(self, positions: NDArray[np.int64]) -> Float64:
        length = self._key("attention.temperature_length", 8192)
        factor = self._key("attention.temperature_scale", 0.1)
        return (1.0 + factor * np.log1p((positions + 1) // length))[:, None, None]

    def _experts(self, h: Float64, logits: Float64, prefix: str) -> Float64:
        chosen = logits.argmax(axis=-1)
        weight = self.weights(logits.max(axis=-1))[:, None]
        y = np.zeros_like(h)
        for expert in set(chosen.tolist()):
            rows = chosen == expert
            y[rows] = self._expert(weight[rows] * h[rows], expert, prefix)
        return y

    @staticmethod
    def weights(logits: Float64) -> Float64:
        """What multiplies the inputs of the chosen experts."""
        return sigmoid(logits)
