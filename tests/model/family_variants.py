"""Structural variants of the small files: experts, fused tensors, drafting blocks."""

from __future__ import annotations

import numpy as np

from tests.model.family_file import HIDDEN, VOCAB, FamilyFile
from tests.model.family_files import EXPERT_KEYS
from tests.model.family_parts import (
    EXPERTS,
    FEED_FORWARD,
    KEY_HEADS,
    LAYERS,
    PER_LAYER,
    STATE,
    USED,
    add_dense,
    add_experts,
)


def make_mixtral(file: FamilyFile) -> FamilyFile:
    """A llama file with experts as wide as the dense blocks they replace."""
    file.keys.update({"expert_count": EXPERTS, "expert_used_count": USED})
    for layer in range(LAYERS):
        for name in ("gate", "up", "down"):
            del file.values[f"blk.{layer}.ffn_{name}.weight"]
        add_experts(file, layer, FEED_FORWARD)
    return file


def make_gemma4_moe(file: FamilyFile) -> FamilyFile:
    """A gemma4 file with experts beside the dense blocks, in all layers but the first."""
    file.keys.update(EXPERT_KEYS)
    for layer in range(1, LAYERS):
        prefix = f"blk.{layer}"
        add_experts(file, layer)
        file.stack(
            f"{prefix}.ffn_gate_up_exps.weight",
            f"{prefix}.ffn_gate_exps.weight",
            f"{prefix}.ffn_up_exps.weight",
            axis=1,
        )
        file.add(f"{prefix}.ffn_gate_inp.scale", HIDDEN)
        file.add(f"{prefix}.ffn_down_exps.scale", EXPERTS)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            file.vector(f"{prefix}.{name}")
    return file


def make_gemma4_per_layer(file: FamilyFile, shared: int = 2) -> FamilyFile:
    """A gemma4 file with embeddings of every layer; its last layers own no keys and values."""
    layers = file.keys["block_count"]
    file.keys["embedding_length_per_layer_input"] = PER_LAYER
    file.keys["attention.shared_kv_layers"] = shared
    widths = [
        FEED_FORWARD if layer < layers - shared else 2 * FEED_FORWARD for layer in range(layers)
    ]
    file.keys["feed_forward_length"] = widths
    file.rows("per_layer_token_embd", VOCAB, layers * PER_LAYER)
    file.rows("per_layer_model_proj", layers * PER_LAYER)
    file.vector("per_layer_proj_norm", PER_LAYER)
    for layer, width in enumerate(widths):
        prefix = f"blk.{layer}"
        add_dense(file, layer, width)
        file.rows(f"{prefix}.inp_gate", PER_LAYER)
        file.rows(f"{prefix}.proj", HIDDEN, PER_LAYER)
        file.vector(f"{prefix}.post_norm")
        if layer >= layers - shared:
            for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
                file.values.pop(f"{prefix}.{name}", None)
    return file


def separate_gate_up(file: FamilyFile) -> FamilyFile:
    """Expert gates and ups stacked in one tensor, gates first."""
    for layer in range(LAYERS):
        prefix = f"blk.{layer}.ffn"
        file.stack(
            f"{prefix}_gate_up_exps.weight",
            f"{prefix}_gate_exps.weight",
            f"{prefix}_up_exps.weight",
            axis=1,
        )
    return file


def legacy_ssm_in(file: FamilyFile) -> FamilyFile:
    """Query, key, values and gates of a delta net by key head, in one tensor."""
    for layer in range(0, LAYERS, 2):
        prefix = f"blk.{layer}"
        rows = file.values.pop(f"{prefix}.attn_qkv.weight")
        keys = KEY_HEADS * STATE
        for name, part in zip("qkv", np.split(rows, [keys, 2 * keys]), strict=True):
            file.values[name] = part
        file.interleave(
            f"{prefix}.ssm_in.weight", KEY_HEADS, "q", "k", "v", f"{prefix}.attn_gate.weight"
        )
    return file


def with_nextn(file: FamilyFile) -> FamilyFile:
    """A drafting block behind the last layer."""
    file.keys.update({"block_count": LAYERS + 1, "nextn_predict_layers": 1})
    file.rows(f"blk.{LAYERS}.nextn.eh_proj", HIDDEN, 2 * HIDDEN)
    file.vector(f"blk.{LAYERS}.attn_norm")
    return file
