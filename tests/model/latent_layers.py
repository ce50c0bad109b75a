"""The layers of a small deepseek2 file: latent rows, experts beside a shared one."""

from __future__ import annotations

from tests.model.family_file import HIDDEN, FamilyFile
from tests.model.family_parts import (
    EXPERT_WIDTH,
    EXPERTS,
    HEADS,
    add_dense,
    add_experts,
    add_shared_expert,
)

RANK, QUERY_RANK, ROTATED, UNROTATED, VALUE = 28, 40, 8, 12, 20
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.key_length": RANK + ROTATED,
    "attention.value_length": RANK,
    "attention.key_length_mla": UNROTATED + ROTATED,
    "attention.value_length_mla": VALUE,
    "attention.kv_lora_rank": RANK,
    "attention.q_lora_rank": QUERY_RANK,
    "rope.dimension_count": ROTATED,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
}


def deepseek2(file: FamilyFile, layer: int) -> None:
    """Experts in all but the first layer."""
    _attention(file, layer)
    file.vector(f"blk.{layer}.ffn_norm")
    if layer < file.keys["leading_dense_block_count"]:
        add_dense(file, layer)
        return
    add_experts(file, layer)
    add_shared_expert(file, layer, EXPERT_WIDTH)
    file.add(f"blk.{layer}.exp_probs_b.bias", EXPERTS)


def _attention(file: FamilyFile, layer: int) -> None:
    """Queries through a narrower product with a norm, latent rows, matrices of heads."""
    prefix = f"blk.{layer}.attn"
    file.vector(f"{prefix}_norm")
    file.rows(f"{prefix}_q_a", QUERY_RANK)
    file.vector(f"{prefix}_q_a_norm", QUERY_RANK)
    file.rows(f"{prefix}_q_b", HEADS * (UNROTATED + ROTATED), QUERY_RANK)
    file.rows(f"{prefix}_kv_a_mqa", RANK + ROTATED)
    file.vector(f"{prefix}_kv_a_norm", RANK)
    file.add(f"{prefix}_k_b.weight", HEADS, RANK, UNROTATED)
    file.add(f"{prefix}_v_b.weight", HEADS, VALUE, RANK)
    file.rows(f"{prefix}_output", HIDDEN, HEADS * VALUE)
