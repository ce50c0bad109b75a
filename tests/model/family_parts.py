"""Parts of the layers of small random-weight files, and their sizes."""

from __future__ import annotations

from tests.model.family_file import HIDDEN, FamilyFile

LAYERS = 4
HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 2, 16, 112
EXPERTS, USED, EXPERT_WIDTH, SHARED_WIDTH = 6, 2, 48, 32
STATE, KEY_HEADS, VALUE_HEADS, TAPS = 16, 2, 4, 4
CHANNELS, VALUE_WIDTH = STATE * (2 * KEY_HEADS + VALUE_HEADS), STATE * VALUE_HEADS
MAMBA_HEADS = 8
LAYER_NORM = "attention.layer_norm_epsilon"
WINDOW, FULL_HEAD_DIM, FULL_KV_HEADS, PER_LAYER = 5, 32, 1, 24


def add_attention(
    file: FamilyFile, layer: int, *, gated: bool = False, norms: bool = False
) -> None:
    prefix = f"blk.{layer}"
    file.vector(f"{prefix}.attn_norm")
    file.rows(f"{prefix}.attn_q", (1 + gated) * HEADS * HEAD_DIM)
    file.rows(f"{prefix}.attn_k", KV_HEADS * HEAD_DIM)
    file.rows(f"{prefix}.attn_v", KV_HEADS * HEAD_DIM)
    file.rows(f"{prefix}.attn_output", HIDDEN, HEADS * HEAD_DIM)
    if norms:
        file.vector(f"{prefix}.attn_q_norm", HEAD_DIM)
        file.vector(f"{prefix}.attn_k_norm", HEAD_DIM)


def add_biases(file: FamilyFile, layer: int) -> None:
    for name, heads in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
        file.add(f"blk.{layer}.attn_{name}.bias", heads * HEAD_DIM)


def add_dense(file: FamilyFile, layer: int, width: int = FEED_FORWARD) -> None:
    file.rows(f"blk.{layer}.ffn_gate", width)
    file.rows(f"blk.{layer}.ffn_up", width)
    file.rows(f"blk.{layer}.ffn_down", HIDDEN, width)


def add_experts(file: FamilyFile, layer: int, width: int = EXPERT_WIDTH) -> None:
    """A router and three matrices of every expert."""
    file.rows(f"blk.{layer}.ffn_gate_inp", EXPERTS)
    for name, shape in {
        "gate": (width, HIDDEN),
        "up": (width, HIDDEN),
        "down": (HIDDEN, width),
    }.items():
        file.add(f"blk.{layer}.ffn_{name}_exps.weight", EXPERTS, *shape)


def add_shared_expert(file: FamilyFile, layer: int, width: int) -> None:
    file.rows(f"blk.{layer}.ffn_gate_shexp", width)
    file.rows(f"blk.{layer}.ffn_up_shexp", width)
    file.rows(f"blk.{layer}.ffn_down_shexp", HIDDEN, width)


def add_gated_experts(file: FamilyFile, layer: int) -> None:
    """Experts beside one with a gate."""
    add_experts(file, layer)
    file.vector(f"blk.{layer}.ffn_gate_inp_shexp")
    add_shared_expert(file, layer, SHARED_WIDTH)
