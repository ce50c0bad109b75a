"""A second oracle: decoders in plain float64, sharing no code with the project.

Weights are read and dequantized by the ``gguf`` package; attention is the textbook softmax over
the whole score matrix; rotary angles come from numpy. Only the formulas are the same."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

SMALLEST_WEIGHT_SUM = 6.103515625e-5
QUERY_ROWS = 512
"""Queries whose scores are in memory at once."""
HEAD_ROWS = 8192
"""Rows of the output matrix expanded at once."""
KEPT_BYTES = 2**26
"""Of matrices in binary64 that a model keeps: each expert asks for those of all."""


class Reader(gguf.GGUFReader):
    """Of plain arrays: slices of a memory map, some for each token of a vocabulary, take thrice as
    long."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the file."""
        return self._plain

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._plain = mapped.view(np.ndarray)


class Float64Llama:
    """llama, qwen2, qwen3 and mixtures like them without rotary scaling other than
    ``rope_freqs``."""

    epsilon = "attention.layer_norm_rms_epsilon"
    """The key of what norms add to the mean of squares."""

    def __init__(self, path: Path) -> None:
        reader = Reader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._kept: dict[str, Float64] = {}
        self.architecture = self._fields["general.architecture"].contents()
        self.layers = self._key("block_count") - self._key("nextn_predict_layers", 0)
        self.hidden = self._key("embedding_length")
        self.heads = self._key("attention.head_count")
        self.kv_heads = self._key("attention.head_count_kv", self.heads)
        self.head_dim = self._key("attention.key_length", self.hidden // max(self.heads, 1))
        self.eps = self._key(self.epsilon)
        self.normalized = self.architecture not in ("qwen2moe", "olmoe", "deepseek")
        """Whether the weights of the chosen experts add to 1."""
        self.late_norms = self.architecture in ("hunyuan-dense", "hunyuan-moe", "maincoder")
        """Whether heads are normed after they are rotated."""
        self.rope_base = self._key("rope.freq_base", 10000.0)
        self.rope_dims = self._key("rope.dimension_count", self.head_dim)

    def logits(self, tokens: Sequence[int]) -> Float64:
        """Teacher-forced logits of every position, float64[len(tokens), vocab]."""
        return self.head(self.states(tokens))

    def states(self, tokens: Sequence[int]) -> Float64:
        """What the output matrix is multiplied by, float64[len(tokens), hidden]."""
        positions = np.arange(len(tokens))
        x = self._rows("token_embd.weight", np.asarray(tokens))
        for layer in range(self.layers):
            x = self._layer(x, layer, positions)
        return self._norm(x, "output_norm")

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm"), layer, positions)
        return x + self._feed_forward(self._norm(x, self._second_norm(layer)), layer)

    def _second_norm(self, layer: int) -> str:
        """The name of the norm before the feed forward."""
        own = f"blk.{layer}.ffn_norm"
        return own if f"{own}.weight" in self._tensors else f"blk.{layer}.post_attention_norm"

    def _feed_forward(self, h: Float64, layer: int) -> Float64:
        prefix = f"blk.{layer}.ffn_"
        if f"{prefix}gate_inp.weight" not in self._tensors:
            return self._gated(h, prefix)
        y = self._experts(h, self._linear(h, f"{prefix}gate_inp"), prefix)
        if f"{prefix}gate_shexp.weight" not in self._tensors:
            return y
        shared = self._gated(h, prefix, "_shexp")
        if f"{prefix}gate_inp_shexp.weight" in self._tensors:
            gate = h @ self._matrix(f"{prefix}gate_inp_shexp.weight").reshape(-1)
            shared = sigmoid(gate)[:, None] * shared
        return y + shared

    def _gated(self, h: Float64, prefix: str, suffix: str = "") -> Float64:
        gate = self._linear(h, f"{prefix}gate{suffix}")
        product = self.activation(gate) * self._linear(h, f"{prefix}up{suffix}")
        return self._linear(product, f"{prefix}down{suffix}")

    @staticmethod
    def activation(x: Float64) -> Float64:
        """What the gate goes through."""
        return silu(x)

    def _experts(self, h: Float64, logits: Float64, prefix: str) -> Float64:
        """The weighted sum over the likeliest experts of every row."""
        probability, used = self._weights(logits, prefix)
        weight = np.take_along_axis(probability, used, axis=-1)
        if self.normalized:
            weight /= np.maximum(weight.sum(axis=-1, keepdims=True), SMALLEST_WEIGHT_SUM)
        weight *= self._key("expert_weights_scale", 1.0)
        y = np.zeros_like(h)
        for expert in range(logits.shape[1]):
            rows, ranks = np.nonzero(used == expert)
            y[rows] += weight[rows, ranks, None] * self._expert(h[rows], expert, prefix)
        return y

    def _expert(self, x: Float64, expert: int, prefix: str) -> Float64:
        """What one expert makes of rows."""
        if f"{prefix}gate_up_exps.weight" in self._tensors:
            gate, up = np.split(self._matrix(f"{prefix}gate_up_exps.weight")[expert], 2)
        else:
            gate, up = (
                self._matrix(f"{prefix}{name}_exps.weight")[expert] for name in ("gate", "up")
            )
        out = self.activation(x @ gate.T) * (x @ up.T)
        out = out @ self._matrix(f"{prefix}down_exps.weight")[expert].T
        if f"{prefix}down_exps.scale" in self._tensors:
            out = out * self._matrix(f"{prefix}down_exps.scale").reshape(-1)[expert]
        return out

    def _weights(self, logits: Float64, prefix: str) -> tuple[Float64, NDArray[np.int64]]:
        """What weights each expert, and the experts of every row."""
        probability = np.exp(log_softmax(logits))
        count = self._key("expert_used_count")
        return probability, np.argsort(-probability, axis=-1, kind="stable")[:, :count]

    def _qkv(self, h: Float64, prefix: str, queries: int) -> list[Float64]:
        """Queries, keys and values, of one matrix or three; ``queries`` is the number of query
        heads, twice where each has a gate."""
        if f"{prefix}qkv.weight" not in self._tensors:
            return [self._linear(h, prefix + name) for name in "qkv"]
        edges = np.cumsum([queries * self.head_dim, self.kv_heads * self.head_dim])
        return np.split(self._linear(h, f"{prefix}qkv"), edges, axis=1)

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count, size = f"blk.{layer}.attn_", len(h), self.head_dim
        q, k, v = self._qkv(h, prefix, self.heads)
        q = q.reshape(count, self.heads, size)
        k = k.reshape(count, self.kv_heads, size)
        v = v.reshape(count, self.kv_heads, size)
        if self.late_norms:
            q, k = self._rotated(q, positions), self._rotated(k, positions)
        if f"{prefix}q_norm.weight" in self._tensors:
            q, k = self._norm_heads(q, f"{prefix}q_norm"), self._norm_heads(k, f"{prefix}k_norm")
        if not self.late_norms:
            q, k = self._rotated(q, positions), self._rotated(k, positions)
        return self._linear(attention(q, k, v, positions, size**-0.5), f"{prefix}output")

    def _rotated(self, x: Float64, positions: NDArray[np.int64]) -> Float64:
        pairs = self.rope_dims // 2
        frequency = float(self.rope_base) ** (-np.arange(pairs) / pairs)
        if "rope_freqs.weight" in self._tensors:
            frequency = frequency / self._matrix("rope_freqs.weight").reshape(-1)
        return self._turned(x, positions[:, None, None] * frequency)

    def _turned(self, x: Float64, angle: Float64) -> Float64:
        pairs = angle.shape[-1]
        turn = np.cos(angle) + 1j * np.sin(angle)
        if self.architecture in ("llama", "llama4", "ernie4_5", "ernie4_5-moe"):
            pair = x[..., 0::2] + 1j * x[..., 1::2]
            turned = pair * turn
            return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
        turned = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * turn
        return np.concatenate([turned.real, turned.imag, x[..., 2 * pairs :]], axis=-1)

    def _norm(self, x: Float64, name: str) -> Float64:
        stored = name if name in self._tensors else f"{name}.weight"
        return self._normed(x) * self._matrix(stored).reshape(-1)

    def _normed(self, x: Float64) -> Float64:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)

    def _norm_heads(self, x: Float64, name: str) -> Float64:
        """The norm of each head, or of all at once, by the width of its weight."""
        width = self._matrix(f"{name}.weight").size
        return self._norm(x.reshape(len(x), -1, width), name).reshape(x.shape)

    def _linear(self, x: Float64, name: str) -> Float64:
        y = x @ self._matrix(f"{name}.weight").T
        bias = f"{name}.bias"
        return y + self._matrix(bias).reshape(-1) if bias in self._tensors else y

    def head(self, h: Float64) -> Float64:
        """Logits of rows of ``states``."""
        name = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        rows = int(self._tensors[name].shape[1])
        parts = [
            h @ self._rows(name, np.arange(start, min(start + HEAD_ROWS, rows))).T
            for start in range(0, rows, HEAD_ROWS)
        ]
        return np.concatenate(parts, axis=1)

    def draft_logits(self, tokens: list[int], without: frozenset[int] = frozenset()) -> Float64:
        """The draft block's logits of the token after each of ``tokens``. Before the positions in
        ``without``, and before the first one, it has zeros instead of a hidden state."""
        block, positions = self.layers, np.arange(len(tokens))
        hidden = self.states(tokens)
        before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
        before[sorted(without)] = 0.0
        own = f"blk.{block}.nextn."
        table = f"{own}embed_tokens.weight"
        table = table if table in self._tensors else "token_embd.weight"
        embedded = self._rows(table, np.asarray(tokens))
        joined = [self._norm(embedded, f"{own}enorm"), self._norm(before, f"{own}hnorm")]
        x = self._linear(np.concatenate(joined, axis=1), f"{own}eh_proj")
        x = x + self._attention(self._norm(x, f"blk.{block}.attn_norm"), block, positions)
        x = x + self._feed_forward(self._norm(x, self._second_norm(block)), block)
        return self.head(self._norm(x, f"{own}shared_head_norm"))

    def _matrix(self, name: str) -> Float64:
        tensor = self._tensors[name]
        matrix = self._kept.get(name)
        if matrix is None:
            matrix = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            matrix.flags.writeable = False
            if matrix.nbytes + sum(kept.nbytes for kept in self._kept.values()) <= KEPT_BYTES:
                self._kept[name] = matrix
        return matrix

    def _rows(self, name: str, rows: NDArray[np.int64]) -> Float64:
        tensor = self._tensors[name]
        return dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float64)

    def _key(self, name: str, default: float | None = None):
        field = self._fields.get(f"{self.architecture}.{name}")
        if field is None:
            assert default is not None, name
            return default
        return field.contents()


def silu(x: Float64) -> Float64:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + np.exp(-x))


def attention(
    q: Float64, k: Float64, v: Float64, positions: NDArray[np.int64], scale: float,
    window: int | None = None, cap: float = 0.0,
) -> Float64:  # fmt: skip
    """Causal softmax attention of q[i, heads, d] over k, v[j, kv heads, d], rows flattened."""
    group = q.shape[1] // k.shape[1]
    mixed = np.empty((*q.shape[:2], v.shape[-1]))
    for start in range(0, len(q), QUERY_ROWS):
        rows = slice(start, start + QUERY_ROWS)
        distance = positions[rows, None] - positions[: rows.stop]
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        for head in range(q.shape[1]):
            scores = q[rows, head] @ k[: rows.stop, head // group].T * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed[rows, head] = scores @ v[: rows.stop, head // group]
    return mixed.reshape(len(q), -1)


def log_softmax(logits: NDArray[np.floating]) -> Float64:
    """Row-wise, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def mean_kl(truth: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Mean over positions of KL(truth || other) in nats, of the softmax of logits."""
    p, q = log_softmax(truth), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
