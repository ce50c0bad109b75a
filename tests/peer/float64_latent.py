"""DeepSeek V2 and V3, Kimi K2 and GLM-4.7 Flash in plain float64, with keys and values of every
head made from the latent rows before attention."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_dense import Float64Dense
from tests.peer.float64_llama import Float64, attention
from tests.peer.float64_mixture import Float64Grouped
from tests.peer.yarn import yarn_frequencies

SIGMOID = 2


class Float64Latent(Float64Grouped):
    """Latent rows; experts as the file says."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.interleaved = True
        self.size = self._key("attention.key_length_mla")
        self.rank = self._key("attention.kv_lora_rank")
        self.normalized = self._key("expert_weights_norm", False)
        self.factor = self._key("rope.scaling.factor", 1.0)
        self.multiplier = self._key("rope.scaling.yarn_log_multiplier", 0.0)

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        if self._key("expert_gating_func") != SIGMOID:
            return Float64Dense._weights(self, logits, prefix)
        return super()._weights(logits, prefix)

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count = f"blk.{layer}.attn_", len(h)
        unrotated = self.size - self.rope_dims
        q = h
        if f"{prefix}q_a.weight" in self._tensors:
            q = self._norm(self._linear(h, f"{prefix}q_a"), f"{prefix}q_a_norm")
            q = self._linear(q, f"{prefix}q_b")
        else:
            q = self._linear(h, f"{prefix}q")
        q = q.reshape(count, self.heads, self.size)
        row = self._linear(h, f"{prefix}kv_a_mqa")
        latent = self._norm(row[:, : self.rank], f"{prefix}kv_a_norm")
        k, v = (np.einsum("tr,hrd->thd", latent, part) for part in self._by_head(prefix))
        turned = self._turn(row[:, None, self.rank :], positions)
        k = np.concatenate([k, np.repeat(turned, self.heads, axis=1)], axis=-1)
        q = np.concatenate([q[..., :unrotated], self._turn(q[..., unrotated:], positions)], axis=-1)
        mixed = attention(q, k, v, positions, self._scale())
        return self._linear(mixed, f"{prefix}output")

    def _by_head(self, prefix: str) -> tuple[Float64, Float64]:
        """Matrices from latent channels to the keys and to the values of each head."""
        return self._matrix(f"{prefix}k_b.weight"), np.swapaxes(
            self._matrix(f"{prefix}v_b.weight"), 1, 2
        )

    def _scale(self) -> float:
        """Queries and keys both grow with YaRN's factor, by as much as ``multiplier`` says."""
        grown = 1 + self.multiplier * np.log(self.factor)
        return (self._turned_size() * grown) ** 2 / np.sqrt(self.size)

    def _turned_size(self) -> float:
        return 1.0 if self.multiplier else 1 + 0.1 * np.log(self.factor)

    def _turn(self, x: Float64, positions: NDArray[np.int64]) -> Float64:
        frequency = float(self.rope_base) ** (
            -np.arange(self.rope_dims // 2) / (self.rope_dims // 2)
        )
        if self.factor != 1.0:
            trained = self._key("rope.scaling.original_context_length")
            frequency = yarn_frequencies(self.rope_base, self.rope_dims, self.factor, trained)
        return self._turned_size() * self._turned(x, positions[:, None, None] * frequency)
