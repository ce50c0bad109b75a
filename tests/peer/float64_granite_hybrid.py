"""Mamba-2 in plain float64, and Granite 4: such layers between those that attend."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_dense import Float64Dense
from tests.peer.float64_llama import Float64, silu


class Mamba2(Float64Dense):
    """Token by token, as the recurrence is defined."""

    def _mamba(self, h: Float64, prefix: str) -> Float64:
        count, heads, groups = len(h), self._key("ssm.time_step_rank"), self._key("ssm.group_count")
        inner, size = self._key("ssm.inner_size"), self._key("ssm.state_size")
        channels = inner + 2 * groups * size
        z, u, dt = np.split(self._linear(h, f"{prefix}in"), [inner, inner + channels], axis=1)
        mixed = self._convolved(u, prefix)
        v, b, c = np.split(mixed, [inner, inner + groups * size], axis=1)
        v = v.reshape(count, heads, -1)
        b, c = (np.repeat(part.reshape(count, groups, size), heads // groups, 1) for part in (b, c))
        step = np.logaddexp(0.0, dt + self._vector(f"{prefix}dt.bias"))
        decay = np.exp(step * self._vector(f"{prefix}a"))
        state = np.zeros((heads, v.shape[2], size))
        y = np.empty_like(v)
        for t in range(count):
            written = (step[t][:, None] * v[t])[:, :, None] * b[t][:, None, :]
            state = decay[t][:, None, None] * state + written
            y[t] = np.einsum("hvs,hs->hv", state, c[t]) + self._vector(f"{prefix}d")[:, None] * v[t]
        y = (silu(z) * y.reshape(count, -1)).reshape(count, groups, -1)
        if f"{prefix}norm.weight" in self._tensors:
            y = self._normed(y) * self._vector(f"{prefix}norm.weight").reshape(groups, -1)
        return self._linear(y.reshape(count, -1), f"{prefix}out")

    def _convolved(self, u: Float64, prefix: str) -> Float64:
        taps, bias = self._matrix(f"{prefix}conv1d.weight"), self._vector(f"{prefix}conv1d.bias")
        past = taps.shape[1] - 1
        padded = np.concatenate([np.zeros((past, u.shape[1])), u])
        return silu(sum(padded[i : i + len(u)] * taps[:, i] for i in range(past + 1)) + bias)

    def _vector(self, name: str) -> Float64:
        return self._matrix(name).reshape(-1)


class Float64Mamba2(Mamba2):
    """Nothing but such layers."""

    def _layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        return x + self._mamba(self._norm(x, f"blk.{layer}.attn_norm"), f"blk.{layer}.ssm_")


class Float64GraniteHybrid(Mamba2):
    """A layer without heads for keys and values is recurrent."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kv_heads_of = list(self.kv_heads)
        self.kv_heads = max(self.kv_heads_of)

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        if self.kv_heads_of[layer]:
            return super()._attention(h, layer, positions)
        return self._mamba(h, f"blk.{layer}.ssm_")

    def _turn_layer(self, x: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        return x
