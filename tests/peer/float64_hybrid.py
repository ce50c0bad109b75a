"""The delta-net hybrids in plain float64: qwen35, qwen35moe and qwen3next."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_llama import Float64, Float64Llama, attention, sigmoid, silu


class Float64Hybrid(Float64Llama):
    """Token by token, as the recurrence is defined."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.grouped = self.architecture == "qwen3next"

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        h = self._norm(x, f"blk.{layer}.attn_norm")
        if self._is_recurrent(layer):
            x = x + self._delta_net(h, f"blk.{layer}.")
        else:
            x = x + self._attention(h, layer, positions)
        return x + self._feed_forward(self._norm(x, f"blk.{layer}.post_attention_norm"), layer)

    def _is_recurrent(self, layer: int) -> bool:
        listed = self._key("attention.recurrent_layers", [])
        if len(listed):
            return bool(listed[layer])
        return (layer + 1) % self._key("full_attention_interval", 4) != 0

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        prefix, count, size = f"blk.{layer}.attn_", len(h), self.head_dim
        q, k, v = self._qkv(h, prefix, 2 * self.heads)
        q, gate = np.moveaxis(q.reshape(count, self.heads, 2, size), 2, 0)
        k = self._norm(k.reshape(count, self.kv_heads, size), f"{prefix}k_norm")
        v = v.reshape(count, self.kv_heads, size)
        q = self._rotated(self._norm(q, f"{prefix}q_norm"), positions)
        mixed = attention(q, self._rotated(k, positions), v, positions, size**-0.5)
        return self._linear(mixed * sigmoid(gate.reshape(count, -1)), f"{prefix}output")

    def _delta_net(self, h: Float64, prefix: str) -> Float64:
        size, heads = self._key("ssm.state_size"), self._key("ssm.time_step_rank")
        key_heads, group = self._key("ssm.group_count"), heads // self._key("ssm.group_count")
        channels, z = self._channels(h, prefix, key_heads, group, size)
        beta, alpha = self._beta_alpha(h, prefix, key_heads, group)
        mixed = self._convolved(channels, prefix)
        q, k, v = np.split(mixed, [key_heads * size, 2 * key_heads * size], axis=1)
        q = self._unit(q.reshape(len(h), key_heads, size)) / np.sqrt(size)
        k = self._unit(k.reshape(len(h), key_heads, size))
        of_head = np.arange(heads) // group if self.grouped else np.arange(heads) % key_heads
        q, k, v = q[:, of_head], k[:, of_head], v.reshape(len(h), heads, size)
        dt = np.logaddexp(0.0, alpha + self._matrix(f"{prefix}ssm_dt.bias").reshape(-1))
        decay = np.exp(dt * self._matrix(f"{prefix}ssm_a").reshape(-1))
        state = np.zeros((heads, size, size))
        out = np.empty((len(h), heads, size))
        for t in range(len(h)):
            state *= decay[t][:, None, None]
            residual = v[t] - np.einsum("hk,hkv->hv", k[t], state)
            state += sigmoid(beta[t])[:, None, None] * k[t][:, :, None] * residual[:, None, :]
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
        y = self._norm(out, f"{prefix}ssm_norm") * silu(z.reshape(out.shape))
        return self._linear(y.reshape(len(h), -1), f"{prefix}ssm_out")

    def _channels(
        self, h: Float64, prefix: str, key_heads: int, group: int, size: int
    ) -> tuple[Float64, Float64]:
        """Queries, keys and values before the convolution, and z."""
        if f"{prefix}ssm_in.weight" not in self._tensors:
            return self._linear(h, f"{prefix}attn_qkv"), self._linear(h, f"{prefix}attn_gate")
        packed = self._linear(h, f"{prefix}ssm_in").reshape(len(h), key_heads, -1)
        parts = np.split(packed, [size, 2 * size, (2 + group) * size], axis=2)
        q, k, v, z = (part.reshape(len(h), -1) for part in parts)
        return np.concatenate([q, k, v], axis=1), z

    def _beta_alpha(
        self, h: Float64, prefix: str, key_heads: int, group: int
    ) -> tuple[Float64, Float64]:
        if f"{prefix}ssm_ba.weight" not in self._tensors:
            return self._linear(h, f"{prefix}ssm_beta"), self._linear(h, f"{prefix}ssm_alpha")
        packed = self._linear(h, f"{prefix}ssm_ba").reshape(len(h), key_heads, 2, group)
        beta, alpha = np.moveaxis(packed, 2, 0)
        return beta.reshape(len(h), -1), alpha.reshape(len(h), -1)

    def _convolved(self, u: Float64, prefix: str) -> Float64:
        taps = self._matrix(f"{prefix}ssm_conv1d.weight")
        kernel = taps.shape[1]
        padded = np.concatenate([np.zeros((kernel - 1, u.shape[1])), u])
        return silu(sum(padded[i : i + len(u)] * taps[:, i] for i in range(kernel)))

    def _unit(self, x: Float64) -> Float64:
        return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + self.eps)
