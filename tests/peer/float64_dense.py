"""SmolLM 3, Granite, GLM-4, Phi 3, OLMo 2 and 3, EXAONE, AFM and others in plain float64."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_llama import Float64, Float64Llama, attention, sigmoid, silu

INTERLEAVED = (
    *("smollm3", "internlm2", "minicpm", "granite", "granitemoe", "glm4", "chatglm", "arcee"),
    *("baichuan", "deepseek", "bailingmoe", "olmo", "xverse", "maincoder"),
)
POST_NORMS = ("glm4", "olmo2", "exaone4", "afmoe")
NO_PRE_NORMS = ("olmo2", "exaone4")


class Float64Dense(Float64Llama):
    """Norms after a block, windows, layers without rotation, factors, gate and up in one tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.interleaved = self.architecture in INTERLEAVED
        self.window = self._key("attention.sliding_window", 0)
        self.windowed_step = 4 if self.architecture in ("olmo2", "exaone4") else 0
        still = self.architecture == "smollm3" or (self.architecture == "exaone4" and self.window)
        self.unrotated_step = 4 if still else 0
        self.embedding_scale = self._key("embedding_scale", 1.0)
        self.residual = self._key("residual_scale", 1.0)

    def logits(self, tokens: list[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens)) * self.embedding_scale
        for layer in range(self.layers):
            x = self._layer(x, layer, positions)
        return self.head(self._norm(x, "output_norm")) / self._key("logit_scale", 1.0)

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix = f"blk.{layer}."
        mixed = self._attention(self._before(x, f"{prefix}attn_norm"), layer, positions)
        x = x + self.residual * self._after(mixed, f"{prefix}post_attention_norm")
        fed = self._feed_forward(self._before(x, f"{prefix}ffn_norm"), layer)
        return x + self.residual * self._after(fed, f"{prefix}post_ffw_norm")

    def _before(self, x: Float64, name: str) -> Float64:
        return x if self.architecture in NO_PRE_NORMS else self._norm(x, name)

    def _after(self, x: Float64, name: str) -> Float64:
        return self._norm(x, name) if self.architecture in POST_NORMS else x

    def _gated(self, h: Float64, prefix: str, suffix: str = "") -> Float64:
        if f"{prefix}gate{suffix}.weight" in self._tensors:
            return super()._gated(h, prefix, suffix)
        if self.architecture == "arcee":
            return self._linear(self.positive(self._linear(h, f"{prefix}up")) ** 2, f"{prefix}down")
        gate, up = np.split(self._linear(h, f"{prefix}up"), 2, axis=1)
        return self._linear(silu(gate) * up, f"{prefix}down")

    @staticmethod
    def positive(x: Float64) -> Float64:
        """What is squared where there are no gates."""
        return np.maximum(x, 0.0)

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count, size = f"blk.{layer}.attn_", len(h), self.head_dim
        q, k, v = self._qkv(h, prefix, self.heads)
        normed = f"{prefix}q_norm.weight" in self._tensors
        if normed and not self.late_norms:
            q, k = self._norm_heads(q, f"{prefix}q_norm"), self._norm_heads(k, f"{prefix}k_norm")
        q, k = (
            self._turn_layer(part.reshape(count, -1, size), layer, positions) for part in (q, k)
        )
        if normed and self.late_norms:
            q, k = self._norm_heads(q, f"{prefix}q_norm"), self._norm_heads(k, f"{prefix}k_norm")
        v = v.reshape(count, self.kv_heads, size)
        scale = self._key("attention.scale", size**-0.5)
        mixed = attention(q, k, v, positions, scale, self._window(layer))
        if f"{prefix}gate.weight" in self._tensors:
            mixed = mixed * sigmoid(self._linear(h, f"{prefix}gate"))
        return self._linear(mixed, f"{prefix}output")

    def _window(self, layer: int) -> int | None:
        full = self.windowed_step and (layer + 1) % self.windowed_step == 0
        return self.window if self.window and not full else None

    def _turn_layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        if self.unrotated_step and (layer + 1) % self.unrotated_step == 0:
            return x
        pairs = self.rope_dims // 2
        frequency = float(self.rope_base) ** (-np.arange(pairs) / pairs)
        for divisors in ("rope_factors_short.weight", "rope_freqs.weight"):
            if divisors in self._tensors:
                frequency = frequency / self._matrix(divisors).reshape(-1)
        turned = self._turned(x, positions[:, None, None] * frequency)
        magnitude = self._key("rope.scaling.attn_factor", 1.0)
        return np.concatenate(
            [magnitude * turned[..., : 2 * pairs], turned[..., 2 * pairs :]], axis=-1
        )

    def _turned(self, x: Float64, angle: Float64) -> Float64:
        if not self.interleaved:
            return super()._turned(x, angle)
        pairs = angle.shape[-1]
        pair = x[..., 0 : 2 * pairs : 2] + 1j * x[..., 1 : 2 * pairs : 2]
        turned = pair * (np.cos(angle) + 1j * np.sin(angle))
        rotated = np.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], -1)
        return np.concatenate([rotated, x[..., 2 * pairs :]], axis=-1)
