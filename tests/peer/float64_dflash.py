"""A DFlash head in plain float64, beside its model."""

from pathlib import Path

import numpy as np

from tests.peer.float64_eagle import Float64Head
from tests.peer.float64_llama import Float64, Float64Llama


class Float64Block(Float64Head):
    """The head in a file, for a model that has what the head lacks."""

    def __init__(self, path: Path, target: Float64Llama) -> None:
        super().__init__(path, target)
        self.mask: int = self._fields["tokenizer.ggml.mask_token_id"].contents()
        self.window: int = self._key("attention.sliding_window", 0)
        self._known: list[tuple[list[int], Float64]] = []

    def block_logits(
        self, tokens: list[int], drafts: int, *, causal: bool = False, kept: bool = True,
        own_windows: bool = False,
    ) -> Float64:  # fmt: skip
        """The logits of the head's tokens at each of ``drafts`` positions after ``tokens``. A
        window is that of the block's last row, or with ``own_windows`` that of each row. The
        controls: ``causal`` rows see only rows before them, and no keys are ``kept`` of the tokens
        before the last."""
        g = self.joined(tokens)[: len(tokens) - 1 if kept else 0]
        ids = np.array([tokens[-1], *[self.mask] * drafts])
        at = np.arange(len(tokens) - 1, len(tokens) + drafts)
        own = self if "token_embd.weight" in self._tensors else self.target
        x = own._rows("token_embd.weight", ids)
        for layer in range(self.layers):
            h = self._norm(x, f"blk.{layer}.attn_norm")
            x = x + self._block_attention(h, g, layer, at, causal, own_windows)
            x = x + self._feed_forward(self._norm(x, f"blk.{layer}.ffn_norm"), layer)
        normed = self._norm(x[1:], "output_norm")
        return (own if "output.weight" not in self._tensors else self).head(normed)

    def joined(self, tokens: list[int]) -> Float64:
        """The fused and normed rows of all ``tokens``: of a sequence that begins with them if that
        is known."""
        for known, rows in self._known:
            if known[: len(tokens)] == tokens:
                return rows[: len(tokens)]
        rows = self._norm(self._linear(self.features(tokens), "fc"), "enc.output_norm")
        self._known.append((tokens, rows))
        return rows

    def _block_attention(
        self, h: Float64, g: Float64, layer: int, at: np.ndarray, causal: bool, own_windows: bool
    ) -> Float64:
        prefix, size = f"blk.{layer}.attn_", self.head_dim
        both, positions = np.concatenate([g, h]), np.concatenate([np.arange(len(g)), at])
        q = self._linear(h, f"{prefix}q").reshape(len(h), self.heads, size)
        k = self._linear(both, f"{prefix}k").reshape(len(both), self.kv_heads, size)
        v = self._linear(both, f"{prefix}v").reshape(len(both), self.kv_heads, size)
        q = self._rotated(self._norm_heads(q, f"{prefix}q_norm"), at)
        k = self._rotated(self._norm_heads(k, f"{prefix}k_norm"), positions)
        ends = at if causal else np.full_like(at, at[-1])
        hidden = positions[None, :] > ends[:, None]
        if self.window and self._key("attention.sliding_window_pattern")[layer]:
            last = at if own_windows else ends
            hidden |= positions[None, :] <= last[:, None] - self.window
        mixed = np.empty_like(q)
        for head in range(self.heads):
            scores = q[:, head] @ k[:, head // (self.heads // self.kv_heads)].T * size**-0.5
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed[:, head] = scores @ v[:, head // (self.heads // self.kv_heads)]
        return self._linear(mixed.reshape(len(h), -1), f"{prefix}output")

    def _rotated(self, x: Float64, positions: np.ndarray) -> Float64:
        return Float64Llama._rotated(self, x, positions)
