"""Layers of small files of families with experts behind dense layers."""

from __future__ import annotations

from tests.model.family_file import FamilyFile
from tests.model.family_parts import (
    EXPERT_WIDTH,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    SHARED_WIDTH,
    add_attention,
    add_dense,
    add_experts,
    add_shared_expert,
)


def dots1(file: FamilyFile, layer: int) -> None:
    """Norms of heads; experts beside a shared one in all but the first layer."""
    _routed(file, layer, EXPERT_WIDTH, norms=True)


def ernie_moe(file: FamilyFile, layer: int) -> None:
    """The same without norms, and a shared expert of another width."""
    _routed(file, layer, SHARED_WIDTH, norms=False)


def bailingmoe2(file: FamilyFile, layer: int) -> None:
    """Queries, keys and values are one tensor."""
    dots1(file, layer)
    file.stack_qkv(layer)


def soft_routed(file: FamilyFile, layer: int) -> None:
    """Experts that a softmax chooses."""
    _routed(file, layer, EXPERT_WIDTH, norms=False)
    file.values.pop(f"blk.{layer}.exp_probs_b.bias", None)


def afmoe(file: FamilyFile, layer: int) -> None:
    """Gates of heads, and norms after the blocks, too."""
    dots1(file, layer)
    file.rows(f"blk.{layer}.attn_gate", HEADS * HEAD_DIM)
    for name in ("post_attention_norm", "post_ffw_norm"):
        file.vector(f"blk.{layer}.{name}")


def _routed(file: FamilyFile, layer: int, shared_width: int, norms: bool) -> None:
    add_attention(file, layer, norms=norms)
    file.vector(f"blk.{layer}.ffn_norm")
    if layer < file.keys["leading_dense_block_count"]:
        add_dense(file, layer)
        return
    add_experts(file, layer)
    add_shared_expert(file, layer, shared_width)
    file.add(f"blk.{layer}.exp_probs_b.bias", EXPERTS)
