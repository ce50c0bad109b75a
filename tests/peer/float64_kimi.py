"""Kimi Linear in plain float64: delta nets with a decay for each key, token by token, between
layers of latent rows of which nothing rotates."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_latent import Float64Latent
from tests.peer.float64_llama import Float64, sigmoid, silu


class Float64Kimi(Float64Latent):
    """A layer without heads for keys and values is a delta net."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kv_heads_of = list(self.kv_heads)
        self.normalized = self._key("expert_weights_norm", True)
        self.one_decay = False
        """Whether the keys of a head decay alike, by the mean of their rates."""
        self.output_gate = sigmoid

    def _turn(self, x: Float64, positions: NDArray[np.int64]) -> Float64:
        return x

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        if self.kv_heads_of[layer]:
            return super()._attention(h, layer, positions)
        return self._delta_net(h, f"blk.{layer}.")

    def _delta_net(self, h: Float64, prefix: str) -> Float64:
        count, size = len(h), self._key("kda.head_dim")
        q, k, v = (self._convolved(h, prefix, n).reshape(count, self.heads, size) for n in "qkv")
        q, k = self._unit(q) / np.sqrt(size), self._unit(k)
        rate = self._linear(self._linear(h, f"{prefix}ssm_f_a"), f"{prefix}ssm_f_b")
        rate = np.logaddexp(0.0, rate + self._matrix(f"{prefix}ssm_dt.bias").reshape(-1))
        rate = rate.reshape(q.shape)
        if self.one_decay:
            rate = np.broadcast_to(rate.mean(axis=2, keepdims=True), q.shape)
        decay = np.exp(rate * self._matrix(f"{prefix}ssm_a").reshape(-1, 1))
        strength = sigmoid(self._linear(h, f"{prefix}ssm_beta"))
        state = np.zeros((self.heads, size, size))
        out = np.empty(q.shape)
        for t in range(count):
            state = decay[t][:, :, None] * state
            error = strength[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * error[:, None, :]
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
        gate = self._linear(self._linear(h, f"{prefix}ssm_g_a"), f"{prefix}ssm_g_b")
        y = self._norm(out, f"{prefix}ssm_norm") * self.output_gate(gate.reshape(q.shape))
        return self._linear(y.reshape(count, -1), f"{prefix}attn_output")

    def _convolved(self, h: Float64, prefix: str, name: str) -> Float64:
        u = self._linear(h, f"{prefix}attn_{name}")
        taps = self._matrix(f"{prefix}ssm_conv1d_{name}.weight").reshape(u.shape[1], -1)
        kernel = taps.shape[1]
        padded = np.concatenate([np.zeros((kernel - 1, u.shape[1])), u])
        return silu(sum(padded[i : i + len(u)] * taps[:, i] for i in range(kernel)))

    def _unit(self, x: Float64) -> Float64:
        return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + self.eps)
