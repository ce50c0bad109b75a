"""All families in plain float64, written from their formulas: nothing of the project is used.

One method a formula, whole sequences at once, textbook softmax, no cache. Tensors and keys are
those of ``tests.model.family_files``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray

HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class Float64Model:
    """The forward pass of one file; ``cache`` keeps keys and values of a layer for others."""

    def __init__(self, architecture: str, keys: Mapping[str, Any], values: Mapping[str, Array]):
        self.architecture = architecture
        self.gemma = architecture.startswith("gemma")
        self.keys = keys
        self.values = {name: value.astype(np.float64) for name, value in values.items()}
        self.layers = keys["block_count"] - keys.get("nextn_predict_layers", 0)
        self.hidden = keys["embedding_length"]
        self.eps = keys["attention.layer_norm_rms_epsilon"]
        self.act = gelu if self.gemma else silu
        self.cache: dict[int, tuple[Array, Array]] = {}

    def logits(self, tokens: Sequence[int]) -> Array:
        ids = np.asarray(tokens)
        x = self.values["token_embd.weight"][ids]
        if self.gemma:
            x = x * math.sqrt(self.hidden)
        extra = self.per_layer_embeddings(x, ids)
        for layer in range(self.layers):
            x = self.block(x, layer, extra)
        x = self.norm(x, "output_norm")
        head = "output.weight" if "output.weight" in self.values else "token_embd.weight"
        y = x @ self.values[head].T
        default = 30.0 if self.architecture == "gemma4" else 0.0
        cap = self.keys.get("final_logit_softcapping", default) if self.gemma else 0.0
        return cap * np.tanh(y / cap) if cap else y

    def block(self, x: Array, layer: int, extra: Array | None) -> Array:
        h = self.norm(x, f"blk.{layer}.attn_norm")
        if not self.gemma:
            x = x + (self.delta_net(h, layer) if self.recurrent(layer) else self.attend(h, layer))
            norm = "post_attention_norm" if self.architecture in HYBRIDS else "ffn_norm"
            h = self.norm(x, f"blk.{layer}.{norm}")
            if not self.has(layer, "ffn_gate_inp"):
                return x + self.dense(h, layer)
            y = x + self.moe(h, h, layer)
            return y + self.shared(h, layer) if self.has(layer, "ffn_up_shexp") else y
        x = x + self.norm(self.attend(h, layer), f"blk.{layer}.post_attention_norm")
        y = self.dense(self.norm(x, f"blk.{layer}.ffn_norm"), layer)
        if self.has(layer, "ffn_gate_inp"):
            y = self.norm(y, f"blk.{layer}.post_ffw_norm_1")
            r = (
                self.unit(x)
                / math.sqrt(self.hidden)
                * self.values[f"blk.{layer}.ffn_gate_inp.scale"]
            )
            h = self.norm(x, f"blk.{layer}.pre_ffw_norm_2")
            y = y + self.norm(self.moe(h, r, layer), f"blk.{layer}.post_ffw_norm_2")
        x = x + self.norm(y, f"blk.{layer}.post_ffw_norm")
        if extra is not None:
            gated = gelu(self.linear(x, layer, "inp_gate")) * extra[:, layer]
            x = x + self.norm(self.linear(gated, layer, "proj"), f"blk.{layer}.post_norm")
        if self.has(layer, "layer_output_scale"):
            x = x * self.values[f"blk.{layer}.layer_output_scale.weight"]
        return x

    def per_layer_embeddings(self, x: Array, ids: Array) -> Array | None:
        width = self.keys.get("embedding_length_per_layer_input", 0)
        if not width:
            return None
        shape = (len(ids), self.layers, width)
        a = self.values["per_layer_token_embd.weight"][ids].reshape(shape) * math.sqrt(width)
        b = x @ self.values["per_layer_model_proj.weight"].T / math.sqrt(self.hidden)
        return (a + self.norm(b.reshape(shape), "per_layer_proj_norm")) / math.sqrt(2.0)

    def unit(self, x: Array) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)

    def norm(self, x: Array, name: str) -> Array:
        return self.unit(x) * self.values[f"{name}.weight"]

    def has(self, layer: int, name: str) -> bool:
        return f"blk.{layer}.{name}.weight" in self.values

    def linear(self, x: Array, layer: int, name: str) -> Array:
        y = x @ self.values[f"blk.{layer}.{name}.weight"].T
        bias = self.values.get(f"blk.{layer}.{name}.bias")
        return y if bias is None else y + bias

    def dense(self, h: Array, layer: int) -> Array:
        gated = self.act(self.linear(h, layer, "ffn_gate")) * self.linear(h, layer, "ffn_up")
        return self.linear(gated, layer, "ffn_down")

    def moe(self, h: Array, r: Array, layer: int) -> Array:
        prefix = f"blk.{layer}.ffn"
        if f"{prefix}_gate_up_exps.weight" in self.values:
            both = self.values[f"{prefix}_gate_up_exps.weight"]
            gates, ups = np.split(both, 2, axis=1)
        else:
            gates = self.values[f"{prefix}_gate_exps.weight"]
            ups = self.values[f"{prefix}_up_exps.weight"]
        downs = self.values[f"{prefix}_down_exps.weight"]
        scale = self.values.get(f"{prefix}_down_exps.scale", np.ones(len(downs)))
        y = np.zeros_like(h)
        for t, p in enumerate(softmax(self.linear(r, layer, "ffn_gate_inp"))):
            chosen = np.argsort(-p)[: self.keys["expert_used_count"]]
            total = max(p[chosen].sum(), 2.0**-14)
            for e in chosen:
                gated = self.act(gates[e] @ h[t]) * (ups[e] @ h[t])
                y[t] += p[e] / total * scale[e] * (downs[e] @ gated)
        return y

    def shared(self, h: Array, layer: int) -> Array:
        gate = sigmoid(h @ self.values[f"blk.{layer}.ffn_gate_inp_shexp.weight"])
        gated = silu(self.linear(h, layer, "ffn_gate_shexp")) * self.linear(
            h, layer, "ffn_up_shexp"
        )
        return gate[:, None] * self.linear(gated, layer, "ffn_down_shexp")

    def recurrent(self, layer: int) -> bool:
        if self.architecture not in HYBRIDS:
            return False
        flags = self.keys.get("attention.recurrent_layers")
        if flags is not None:
            return flags[layer]
        return (layer + 1) % self.keys.get("full_attention_interval", 4) != 0

    def sliding(self, layer: int) -> bool:
        if not self.gemma or not self.keys.get("attention.sliding_window"):
            return False
        pattern = self.keys.get("attention.sliding_window_pattern", 6)
        if isinstance(pattern, int):
            return layer % pattern < pattern - 1
        return pattern[layer]

    def per_layer(self, name: str, layer: int) -> int:
        value = self.keys[name]
        return value if isinstance(value, int) else value[layer]

    def attend(self, h: Array, layer: int) -> Array:
        count, prefix, sliding = len(h), f"blk.{layer}", self.sliding(layer)
        size = self.keys["attention.key_length"]
        if sliding:
            size = self.keys.get("attention.key_length_swa", size)
        heads = self.per_layer("attention.head_count", layer)
        q, gate = self.linear(h, layer, "attn_q"), None
        if self.architecture in HYBRIDS:
            both = q.reshape(count, heads, 2, size)
            q, gate = both[:, :, 0], both[:, :, 1]
        q = q.reshape(count, heads, size)
        if f"{prefix}.attn_q_norm.weight" in self.values:
            q = self.norm(q, f"{prefix}.attn_q_norm")
        q = self.rotate(q, sliding)
        k, v = self.keys_values(h, layer, size, sliding)
        scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, heads // k.shape[1], axis=1))
        scores = scores * self.scale(size, heads)
        distance = np.arange(count)[:, None] - np.arange(count)[None, :]
        visible = distance >= 0
        if sliding:
            visible &= distance < self.keys["attention.sliding_window"]
        weights = softmax(np.where(visible, scores, -np.inf))
        mixed = np.einsum("hij,jhd->ihd", weights, np.repeat(v, heads // v.shape[1], axis=1))
        if gate is not None:
            mixed = mixed * sigmoid(gate)
        return self.linear(mixed.reshape(count, -1), layer, "attn_output")

    def scale(self, size: int, heads: int) -> float:
        if self.architecture == "gemma4":
            return 1.0
        if self.architecture == "gemma3" and self.layers == 62:
            return 1.0 / math.sqrt(self.hidden / heads)
        return 1.0 / math.sqrt(size)

    def keys_values(self, h: Array, layer: int, size: int, sliding: bool) -> tuple[Array, Array]:
        shared = self.keys.get("attention.shared_kv_layers", 0)
        if layer >= self.layers - shared:
            return self.cache[self.layers - shared - (2 if sliding else 1)]
        raw = self.linear(h, layer, "attn_k").reshape(len(h), -1, size)
        own = self.has(layer, "attn_v")
        v = self.linear(h, layer, "attn_v").reshape(raw.shape) if own else raw
        if self.architecture == "gemma4":
            v = self.unit(v)
        k = self.norm(raw, f"blk.{layer}.attn_k_norm") if self.has(layer, "attn_k_norm") else raw
        self.cache[layer] = self.rotate(k, sliding), v
        return self.cache[layer]

    def rotate(self, x: Array, sliding: bool) -> Array:
        dims = self.keys.get("rope.dimension_count", x.shape[-1])
        base = self.keys.get("rope.freq_base", 10000.0)
        if sliding:
            dims = self.keys.get("rope.dimension_count_swa", dims)
            base = self.keys.get("rope.freq_base_swa", 10000.0)
        frequency = base ** (-2.0 * np.arange(dims // 2) / dims)
        if not sliding:
            frequency = frequency / self.keys.get("rope.scaling.factor", 1.0)
            if "rope_freqs.weight" in self.values:
                frequency = frequency / self.values["rope_freqs.weight"]
        angle = np.arange(len(x))[:, None, None] * frequency
        turn = np.cos(angle) + 1j * np.sin(angle)
        y = x.copy()
        if self.architecture == "llama":
            turned = (x[..., 0:dims:2] + 1j * x[..., 1:dims:2]) * turn
            y[..., 0:dims:2], y[..., 1:dims:2] = turned.real, turned.imag
        else:
            half = dims // 2
            turned = (x[..., :half] + 1j * x[..., half:dims]) * turn
            y[..., :half], y[..., half:dims] = turned.real, turned.imag
        return y

    def delta_inputs(self, h: Array, layer: int) -> tuple[Array, Array, Array, Array]:
        """u, z, beta and alpha before their activations, from whichever packing there is."""
        size, nk = self.keys["ssm.state_size"], self.keys["ssm.group_count"]
        per_key = self.keys["ssm.time_step_rank"] // nk
        if self.has(layer, "ssm_in"):
            packed = self.linear(h, layer, "ssm_in").reshape(len(h), nk, -1)
            edges = np.cumsum([size, size, size * per_key])
            q, k, v, z = (part.reshape(len(h), -1) for part in np.split(packed, edges, axis=2))
            u = np.concatenate([q, k, v], axis=1)
        else:
            u, z = self.linear(h, layer, "attn_qkv"), self.linear(h, layer, "attn_gate")
        if not self.has(layer, "ssm_ba"):
            return u, z, self.linear(h, layer, "ssm_beta"), self.linear(h, layer, "ssm_alpha")
        both = self.linear(h, layer, "ssm_ba").reshape(len(h), nk, 2, per_key)
        return u, z, both[:, :, 0].reshape(len(h), -1), both[:, :, 1].reshape(len(h), -1)

    def delta_net(self, h: Array, layer: int) -> Array:
        size, nk = self.keys["ssm.state_size"], self.keys["ssm.group_count"]
        nv, prefix, count = self.keys["ssm.time_step_rank"], f"blk.{layer}", len(h)
        u, z, beta, alpha = self.delta_inputs(h, layer)
        beta = sigmoid(beta)
        softplus = np.log1p(np.exp(alpha + self.values[f"{prefix}.ssm_dt.bias"]))
        decay = np.exp(softplus * self.values[f"{prefix}.ssm_a"])
        taps = self.values[f"{prefix}.ssm_conv1d.weight"]
        length = taps.shape[1]
        padded = np.concatenate([np.zeros((length - 1, u.shape[1])), u])
        c = silu(sum(taps[:, i] * padded[i : i + count] for i in range(length)))
        q, k, v = np.split(c, [nk * size, 2 * nk * size], axis=1)
        q, k, v = (part.reshape(count, -1, size) for part in (q, k, v))
        q = q / np.sqrt((q * q).sum(axis=-1, keepdims=True) + self.eps) / math.sqrt(size)
        k = k / np.sqrt((k * k).sum(axis=-1, keepdims=True) + self.eps)
        y = np.empty((count, nv, size))
        for head in range(nv):
            key = head // (nv // nk) if self.architecture == "qwen3next" else head % nk
            memory = np.zeros((size, size))
            for t in range(count):
                memory = decay[t, head] * memory
                error = v[t, head] - memory.T @ k[t, key]
                memory = memory + beta[t, head] * np.outer(k[t, key], error)
                y[t, head] = memory.T @ q[t, key]
        gated = self.norm(y, f"{prefix}.ssm_norm") * silu(z.reshape(y.shape))
        return self.linear(gated.reshape(count, -1), layer, "ssm_out")
