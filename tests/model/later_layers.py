"""Layers of Llama 4 and Apertus in small random-weight files."""

from __future__ import annotations

from typing import Any

from tests.model.family_file import HIDDEN, FamilyFile
from tests.model.family_parts import (
    EXPERT_WIDTH,
    EXPERTS,
    FEED_FORWARD,
    add_attention,
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
