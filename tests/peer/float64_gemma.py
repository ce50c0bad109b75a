"""Gemma 1 to 4 in plain float64."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_llama import Float64, Float64Llama, attention

GELU_FACTOR, GELU_CUBE = 0.7978845608, 0.044715
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
DEFAULT_SOFTCAP = {"gemma": 0.0, "gemma2": 30.0, "gemma3": 0.0, "gemma4": 30.0}


class Float64Gemma(Float64Llama):
    """Sandwich norms, windowed layers with rotary bases of their own, a capped head."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        window = self._key("attention.sliding_window", 0)
        pattern = self._key("attention.sliding_window_pattern", 6)
        if isinstance(pattern, int):
            pattern = [layer % pattern < pattern - 1 for layer in range(self.layers)]
        self.windows = [window if window and windowed else None for windowed in pattern]
        self.four = self.architecture == "gemma4"
        self.deep = self.layers == LAYERS_OF_27B.get(self.architecture)
        self.score_cap = self._key("attn_logit_softcapping", 0.0)
        self.own_kv = self.layers - self._key("attention.shared_kv_layers", 0)
        self._cache: dict[int, tuple[Float64, Float64]] = {}
        self._per_layer: Float64 | None = None

    @staticmethod
    def activation(x: Float64) -> Float64:
        """GELU by the hyperbolic tangent."""
        return 0.5 * x * (1.0 + np.tanh(GELU_FACTOR * x * (1.0 + GELU_CUBE * x * x)))

    def logits(self, tokens: list[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens)) * math.sqrt(self.hidden)
        if self._key("embedding_length_per_layer_input", 0):
            self._per_layer = self._per_layer_inputs(x, np.asarray(tokens))
        for layer in range(self.layers):
            x = self._layer(x, layer, positions)
        y = self.head(self._norm(x, "output_norm"))
        cap = self._key("final_logit_softcapping", DEFAULT_SOFTCAP[self.architecture])
        return cap * np.tanh(y / cap) if cap else y

    def _per_layer_inputs(self, x: Float64, tokens: NDArray[np.int64]) -> Float64:
        width = self._key("embedding_length_per_layer_input")
        shape = (len(x), self.layers, width)
        own = self._rows("per_layer_token_embd.weight", tokens).reshape(shape) * math.sqrt(width)
        projected = self._linear(x, "per_layer_model_proj") / math.sqrt(self.hidden)
        return (own + self._norm(projected.reshape(shape), "per_layer_proj_norm")) / math.sqrt(2)

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix = f"blk.{layer}."
        mixed = self._attention(self._norm(x, f"{prefix}attn_norm"), layer, positions)
        x = x + self._after(mixed, f"{prefix}post_attention_norm")
        y = self._gated(self._norm(x, f"{prefix}ffn_norm"), f"{prefix}ffn_")
        if f"{prefix}ffn_gate_inp.weight" in self._tensors:
            scale = self._matrix(f"{prefix}ffn_gate_inp.scale").reshape(-1)
            router = self._normed(x) / math.sqrt(self.hidden) * scale
            routed = self._experts(
                self._norm(x, f"{prefix}pre_ffw_norm_2"),
                self._linear(router, f"{prefix}ffn_gate_inp"),
                f"{prefix}ffn_",
            )
            y = self._norm(y, f"{prefix}post_ffw_norm_1")
            y = y + self._norm(routed, f"{prefix}post_ffw_norm_2")
        x = x + self._after(y, f"{prefix}post_ffw_norm")
        if self._per_layer is not None:
            gate = self.activation(self._linear(x, f"{prefix}inp_gate"))
            added = self._linear(gate * self._per_layer[:, layer], f"{prefix}proj")
            x = x + self._norm(added, f"{prefix}post_norm")
        if f"{prefix}layer_output_scale.weight" in self._tensors:
            x = x * self._matrix(f"{prefix}layer_output_scale.weight").reshape(-1)
        return x

    def _after(self, x: Float64, name: str) -> Float64:
        """The norm of a block's result, where the file has it."""
        return self._norm(x, name) if f"{name}.weight" in self._tensors else x

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix = f"blk.{layer}.attn_"
        q = self._heads_of(self._linear(h, f"{prefix}q"), layer, self.heads)
        q = self._turned(self._after(q, f"{prefix}q_norm"), self._angle(layer, positions))
        if layer < self.own_kv:
            self._cache[layer] = self._keys_values(h, layer, positions)
        k, v = self._cache[self._donor(layer)]
        scale, window = self._scale(q.shape[-1]), self.windows[layer]
        mixed = attention(q, k, v, positions, scale, window, self.score_cap)
        return self._linear(mixed, f"{prefix}output")

    def _scale(self, size: int) -> float:
        if self.four:
            return 1.0
        return ((self.hidden / self.heads) if self.deep else size) ** -0.5

    def _donor(self, layer: int) -> int:
        """The layer whose keys and values this one reads."""
        if layer < self.own_kv:
            return layer
        return self.own_kv - (1 if self.windows[layer] is None else 2)

    def _keys_values(
        self, h: Float64, layer: int, positions: NDArray[np.int64]
    ) -> tuple[Float64, Float64]:
        prefix, heads = f"blk.{layer}.attn_", self.kv_heads
        if not isinstance(heads, int):
            heads = heads[layer]
        k = self._heads_of(self._linear(h, f"{prefix}k"), layer, heads)
        v = k
        if f"{prefix}v.weight" in self._tensors:
            v = self._heads_of(self._linear(h, f"{prefix}v"), layer, heads)
        k = self._turned(self._after(k, f"{prefix}k_norm"), self._angle(layer, positions))
        return k, self._normed(v) if self.four else v

    def _heads_of(self, x: Float64, layer: int, heads: int) -> Float64:
        size = self.head_dim
        if self.windows[layer] is not None:
            size = self._key("attention.key_length_swa", size)
        return x.reshape(len(x), heads, size)

    def _angle(self, layer: int, positions: NDArray[np.int64]) -> Float64:
        windowed = self.windows[layer] is not None
        dims = self._key("rope.dimension_count_swa", self.rope_dims) if windowed else self.rope_dims
        base = self._key("rope.freq_base_swa", 10000.0) if windowed else self.rope_base
        frequency = float(base) ** (-np.arange(dims // 2) / (dims // 2))
        if not windowed:
            frequency = frequency / self._key("rope.scaling.factor", 1.0)
        if not windowed and "rope_freqs.weight" in self._tensors:
            frequency = frequency / self._matrix("rope_freqs.weight").reshape(-1)
        return positions[:, None, None] * frequency
