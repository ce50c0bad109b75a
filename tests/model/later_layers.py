"""Layers of Llama 4, Apertus, families of layer norms and others in small random-weight files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.model.family_file import HIDDEN, VOCAB, FamilyFile
from tests.model.family_parts import (
    EXPERT_WIDTH,
    EXPERTS,
    FEED_FORWARD,
    HEAD_DIM,
    add_attention,
    add_biases,
    add_dense,
    add_experts,
    add_shared_expert,
)

APERTUS_KEYS: dict[str, Any] = {
    "xielu.alpha_p": [0.1, 0.2, 0.3, 0.4],
    "xielu.alpha_n": 0.5,
    "xielu.beta": 0.5,
    "xielu.eps": [-0.125] * 4,
}
LLAMA4_KEYS: dict[str, Any] = {
    "expert_count": EXPERTS,
    "expert_used_count": 1,
    "expert_feed_forward_length": EXPERT_WIDTH,
    "interleave_moe_layer_step": 2,
}


def apertus(file: FamilyFile, layer: int) -> None:
    """Norms of heads, no gates."""
    add_attention(file, layer, norms=True)
    file.vector(f"blk.{layer}.ffn_norm")
    file.rows(f"blk.{layer}.ffn_up", FEED_FORWARD)
    file.rows(f"blk.{layer}.ffn_down", HIDDEN, FEED_FORWARD)


def llama4(file: FamilyFile, layer: int) -> None:
    """Experts beside a shared one in every second layer."""
    add_attention(file, layer)
    file.vector(f"blk.{layer}.ffn_norm")
    if (layer + 1) % file.keys["interleave_moe_layer_step"]:
        add_dense(file, layer)
        return
    add_experts(file, layer)
    add_shared_expert(file, layer, EXPERT_WIDTH)


def stablelm(file: FamilyFile, layer: int) -> None:
    """Norms with biases."""
    add_attention(file, layer)
    add_dense(file, layer)
    file.vector(f"blk.{layer}.ffn_norm")
    for name in ("output_norm", f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"):
        file.add(f"{name}.bias", HIDDEN)


def starcoder2(file: FamilyFile, layer: int) -> None:
    """A bias for everything, no gates."""
    stablelm(file, layer)
    add_biases(file, layer)
    del file.values[f"blk.{layer}.ffn_gate.weight"]
    for name, width in {"attn_output": HIDDEN, "ffn_up": FEED_FORWARD, "ffn_down": HIDDEN}.items():
        file.add(f"blk.{layer}.{name}.bias", width)


def phi2(file: FamilyFile, layer: int) -> None:
    """One norm before both blocks."""
    starcoder2(file, layer)
    for suffix in ("weight", "bias"):
        del file.values[f"blk.{layer}.ffn_norm.{suffix}"]
    file.rows("output", VOCAB)
    file.add("output.bias", VOCAB)


def nemotron(file: FamilyFile, layer: int) -> None:
    """No gates."""
    stablelm(file, layer)
    del file.values[f"blk.{layer}.ffn_gate.weight"]


def falcon(file: FamilyFile, layer: int) -> None:
    """One norm before both blocks, queries, keys and values in one tensor, no gates."""
    nemotron(file, layer)
    for suffix in ("weight", "bias"):
        del file.values[f"blk.{layer}.ffn_norm.{suffix}"]
    file.stack_qkv(layer)


def olmo(file: FamilyFile, layer: int) -> None:
    """Norms without weights."""
    add_attention(file, layer)
    add_dense(file, layer)
    for name in ("output_norm", f"blk.{layer}.attn_norm"):
        file.values.pop(f"{name}.weight", None)


def arcee(file: FamilyFile, layer: int) -> None:
    """No gates."""
    apertus(file, layer)
    for side in "qk":
        del file.values[f"blk.{layer}.attn_{side}_norm.weight"]


def chatglm(file: FamilyFile, layer: int) -> None:
    """Gate rows, then up rows, are one tensor, and so are queries, keys and values with biases."""
    llama(file, layer)
    add_biases(file, layer)
    prefix = f"blk.{layer}.ffn"
    file.stack(f"{prefix}_up.weight", f"{prefix}_gate.weight", f"{prefix}_up.weight")
    file.stack_qkv(layer)
    file.stack_qkv(layer, "bias")


def llama(file: FamilyFile, layer: int) -> None:
    """Attention and a dense block."""
    add_attention(file, layer)
    file.vector(f"blk.{layer}.ffn_norm")
    add_dense(file, layer)


LAYER_NORMED: Mapping[str, Callable[[FamilyFile, int], None]] = {
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "phi2": phi2,
    "gptneox": starcoder2,
    "falcon": falcon,
    "nemotron": nemotron,
    "olmo": olmo,
}
LIKE_LLAMA: Mapping[str, Callable[[FamilyFile, int], None]] = {
    "arcee": arcee,
    "baichuan": llama,
    "chatglm": chatglm,
    "exaone": llama,
}
PARTLY = {"rope.dimension_count": HEAD_DIM // 4}
LAYER_NORMED_KEYS: Mapping[str, dict[str, Any]] = {
    "nemotron": {"rope.dimension_count": HEAD_DIM // 2},
    "stablelm": {**PARTLY, "use_parallel_residual": False},
    "phi2": PARTLY,
    "gptneox": {**PARTLY, "use_parallel_residual": True},
}
