"""A second oracle: the dense decoder in plain float64, sharing no code with the project.

Weights are read and dequantized by the ``gguf`` package; attention is the textbook softmax over
the whole score matrix; rotary angles come from numpy. Only the formulas are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

HEAD_ROWS = 8192
"""Rows of the output matrix expanded at once."""


class Float64Llama:
    """llama, qwen2 and qwen3 without rotary scaling other than ``rope_freqs``."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self._fields["general.architecture"].contents()
        self.layers = self._key("block_count")
        self.hidden = self._key("embedding_length")
        self.heads = self._key("attention.head_count")
        self.kv_heads = self._key("attention.head_count_kv", self.heads)
        self.head_dim = self._key("attention.key_length", self.hidden // self.heads)
        self.eps = self._key("attention.layer_norm_rms_epsilon")
        self.rope_base = self._key("rope.freq_base", 10000.0)

    def logits(self, tokens: Sequence[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens))
        for layer in range(self.layers):
            x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm"), layer, positions)
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate = self._linear(h, f"blk.{layer}.ffn_gate")
            up = self._linear(h, f"blk.{layer}.ffn_up")
            x = x + self._linear(gate / (1.0 + np.exp(-gate)) * up, f"blk.{layer}.ffn_down")
        return self._head(self._norm(x, "output_norm"))

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count, size = f"blk.{layer}.attn_", len(h), self.head_dim
        if f"{prefix}qkv.weight" in self._tensors:
            packed = self._linear(h, f"{prefix}qkv")
            edges = np.cumsum([self.heads * size, self.kv_heads * size])
            q, k, v = np.split(packed, edges, axis=1)
        else:
            q, k, v = (self._linear(h, prefix + name) for name in "qkv")
        q = q.reshape(count, self.heads, size)
        k = k.reshape(count, self.kv_heads, size)
        v = v.reshape(count, self.kv_heads, size)
        if f"{prefix}q_norm.weight" in self._tensors:
            q, k = self._norm(q, f"{prefix}q_norm"), self._norm(k, f"{prefix}k_norm")
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(size)
        scores[:, positions[:, None] < positions[None, :]] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", scores, v).reshape(count, -1)
        return self._linear(mixed, f"{prefix}output")

    def _rotated(self, x: Float64, positions: NDArray[np.int64]) -> Float64:
        pairs = self.head_dim // 2
        frequency = float(self.rope_base) ** (-np.arange(pairs) / pairs)
        if "rope_freqs.weight" in self._tensors:
            frequency = frequency / self._matrix("rope_freqs.weight").reshape(-1)
        angle = positions[:, None, None] * frequency
        turn = np.cos(angle) + 1j * np.sin(angle)
        if self.architecture == "llama":
            pair = x[..., 0::2] + 1j * x[..., 1::2]
            turned = pair * turn
            return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
        turned = (x[..., :pairs] + 1j * x[..., pairs:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _norm(self, x: Float64, name: str) -> Float64:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x / scale * self._matrix(f"{name}.weight").reshape(-1)

    def _linear(self, x: Float64, name: str) -> Float64:
        y = x @ self._matrix(f"{name}.weight").T
        bias = f"{name}.bias"
        return y + self._matrix(bias).reshape(-1) if bias in self._tensors else y

    def _head(self, h: Float64) -> Float64:
        name = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        rows = int(self._tensors[name].shape[1])
        parts = [
            h @ self._rows(name, np.arange(start, min(start + HEAD_ROWS, rows))).T
            for start in range(0, rows, HEAD_ROWS)
        ]
        return np.concatenate(parts, axis=1)

    def _matrix(self, name: str) -> Float64:
        tensor = self._tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def _rows(self, name: str, rows: NDArray[np.int64]) -> Float64:
        tensor = self._tensors[name]
        return dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float64)

    def _key(self, name: str, default: float | None = None):
        field = self._fields.get(f"{self.architecture}.{name}")
        if field is None:
            assert default is not None, name
            return default
        return field.contents()


def log_softmax(logits: NDArray[np.floating]) -> Float64:
    """Row-wise, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def mean_kl(truth: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Mean over positions of KL(truth || other) in nats, of the softmax of logits."""
    p, q = log_softmax(truth), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
