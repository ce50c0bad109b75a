"""An EAGLE-3 head in plain float64, beside its model."""

from pathlib import Path

import numpy as np

from tests.peer.float64_llama import Float64, Float64Llama


class Float64Head(Float64Llama):
    """The head in a file, for a model that has what the head lacks."""

    def __init__(self, path: Path, target: Float64Llama) -> None:
        super().__init__(path)
        self.target = target
        self.read_layers: list[int] = list(self._key("target_layers"))

    def features(self, tokens: list[int]) -> Float64:
        """The inputs of three layers of the model side by side."""
        positions, inputs = np.arange(len(tokens)), []
        x = self.target._rows("token_embd.weight", np.asarray(tokens))
        for layer in range(self.target.layers):
            inputs.append(x)
            x = self.target._layer(x, layer, positions)
        inputs.append(x)
        return np.concatenate([inputs[n] for n in self.read_layers], axis=1)

    def draft_logits(
        self, tokens: list[int], without: frozenset[int] = frozenset(), first_key: bool = True
    ) -> Float64:
        """The logits of the head's tokens after each of ``tokens``. Before the positions in
        ``without``, and before the first one, it has zeros instead of a row of the model. Unless
        there is a ``first_key`` the first token is left out."""
        features = self.features(tokens)
        if self._key("norm_before_fc"):
            features = self._norm(features, "enc.output_norm")
        joined = self._linear(features, "fc")
        before = np.concatenate([np.zeros_like(joined[:1]), joined[:-1]])
        before[sorted(without)] = 0.0
        first = 0 if first_key else 1
        x = self._row_states(tokens[first:], before[first:])
        normed = self._norm(x, "output_norm")
        return (self if "output.weight" in self._tensors else self.target).head(normed)

    def _row_states(self, tokens: list[int], before: Float64) -> Float64:
        own = self if "token_embd.weight" in self._tensors else self.target
        embedded = self._norm(own._rows("token_embd.weight", np.asarray(tokens)), "blk.0.attn_norm")
        normed = self._norm(before, "blk.0.attn_norm_2")
        x = normed if self._key("norm_before_residual") else before
        x = x + self._attention(np.concatenate([embedded, normed], axis=1), 0, np.arange(len(x)))
        return x + self._feed_forward(self._norm(x, "blk.0.ffn_norm"), 0)

    def _rotated(self, x: Float64, positions: np.ndarray) -> Float64:
        pairs = x.shape[-1] // 2
        frequency = float(self.rope_base) ** (-np.arange(pairs) / pairs)
        if "rope_freqs.weight" in self._tensors:
            frequency = frequency / self._matrix("rope_freqs.weight").reshape(-1)
        turn = np.exp(1j * positions[:, None, None] * frequency)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
