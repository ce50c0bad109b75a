"""Gemma 3n in plain float64."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_gemma import Float64Gemma
from tests.peer.float64_llama import Float64


class Float64Gemma3n(Float64Gemma):
    """Streams beside the one that layers read, products of low rank beside attention, gates of
    which only the largest are kept."""

    streams = 4

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.four = True
        self.unbiased = 0
        """What the count of gates is divided by less, for their deviation."""

    def logits(self, tokens: list[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens)) * math.sqrt(self.hidden)
        inputs = self._per_layer_inputs(x, np.asarray(tokens))
        others = [self._as_large(x @ matrix.T, x) for matrix in self._matrix("altup_proj.weight")]
        streams = np.stack([x, *others])
        for layer in range(self.layers):
            streams = self._mixed(streams, layer, positions, inputs[:, layer])
        matrices = self._matrix("altup_unembd_proj.weight")
        merged = streams[0] + sum(
            self._as_large(stream @ matrix.T, streams[0])
            for stream, matrix in zip(streams[1:], matrices, strict=True)
        )
        y = self.head(self._norm(merged / self.streams, "output_norm"))
        cap = self._key("final_logit_softcapping", 30.0)
        return cap * np.tanh(y / cap)

    @staticmethod
    def _as_large(x: Float64, like: Float64) -> Float64:
        norm = np.linalg.norm
        return x * norm(like, axis=-1, keepdims=True) / norm(x, axis=-1, keepdims=True)

    def _mixed(
        self, streams: Float64, layer: int, positions: NDArray[np.int64], inputs: Float64
    ) -> Float64:
        """What a layer makes of all streams, float64[streams, tokens, hidden]."""
        prefix, count = f"blk.{layer}.", self.streams
        c = self._modalities(streams[0], prefix) @ self._predict(prefix).T
        predicted = streams + np.einsum("tij,jth->ith", c.reshape(-1, count, count), streams)
        active = self._layer(predicted[0], layer, positions)
        correct = self._matrix(f"{prefix}altup_correct_coef.weight")
        d = 1.0 + self._modalities(active, prefix) @ correct.T
        corrected = predicted + d.T[:, :, None] * (active - predicted[0])
        scaled = corrected[0] * self._matrix(f"{prefix}altup_correct_scale.weight").reshape(-1)
        gate = self.activation(self._linear(scaled, f"{prefix}inp_gate"))
        more = self._norm(self._linear(gate * inputs, f"{prefix}proj"), f"{prefix}post_norm")
        corrected[1:] += more
        return corrected

    def _predict(self, prefix: str) -> Float64:
        return self._matrix(f"{prefix}altup_predict_coef.weight")

    def _modalities(self, x: Float64, prefix: str) -> Float64:
        h = self._norm(x, f"{prefix}altup_router_norm") / self.hidden
        return np.tanh(self._linear(h, f"{prefix}altup_router"))

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix = f"blk.{layer}."
        h = self._norm(x, f"{prefix}attn_norm")
        low = self._linear(self._linear(h, f"{prefix}laurel_l"), f"{prefix}laurel_r")
        laurel = h + self._norm(low, f"{prefix}laurel_post_norm")
        mixed = self._attention(h, layer, positions)
        x = x + self._norm(mixed, f"{prefix}post_attention_norm")
        x = (x + laurel) / math.sqrt(2.0)
        h = self._norm(x, f"{prefix}ffn_norm")
        gate = self._largest(self._linear(h, f"{prefix}ffn_gate"), layer)
        product = self.activation(gate) * self._linear(h, f"{prefix}ffn_up")
        return x + self._norm(self._linear(product, f"{prefix}ffn_down"), f"{prefix}post_ffw_norm")

    def _largest(self, gate: Float64, layer: int) -> Float64:
        deviations = float(self._key("activation_sparsity_scale")[layer])
        if deviations == -math.inf:
            return gate
        deviation = gate.std(axis=-1, keepdims=True, ddof=self.unbiased)
        cut = gate.mean(axis=-1, keepdims=True) + deviations * deviation
        return np.maximum(gate - cut, 0.0)
