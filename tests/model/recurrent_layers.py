"""Recurrent layers of small random-weight files, and those between them."""

from __future__ import annotations

from tests.model.family_file import HIDDEN, FamilyFile
from tests.model.family_parts import (
    CHANNELS,
    EXPERTS,
    FEED_FORWARD,
    KEY_HEADS,
    MAMBA_HEADS,
    SHARED_WIDTH,
    STATE,
    TAPS,
    VALUE_HEADS,
    VALUE_WIDTH,
    add_attention,
    add_dense,
    add_experts,
    add_gated_experts,
    add_shared_expert,
)


def _mixer(file: FamilyFile, layer: int) -> None:
    prefix = f"blk.{layer}"
    file.vector(f"{prefix}.post_attention_norm")
    if layer % 2:
        add_attention(file, layer, gated=True, norms=True)
        return
    file.vector(f"{prefix}.attn_norm")
    file.rows(f"{prefix}.attn_qkv", CHANNELS)
    file.rows(f"{prefix}.attn_gate", VALUE_WIDTH)
    file.rows(f"{prefix}.ssm_conv1d", CHANNELS, TAPS)
    file.add(f"{prefix}.ssm_dt.bias", VALUE_HEADS)
    file.add(f"{prefix}.ssm_a", VALUE_HEADS)
    file.rows(f"{prefix}.ssm_beta", VALUE_HEADS)
    file.rows(f"{prefix}.ssm_alpha", VALUE_HEADS)
    file.vector(f"{prefix}.ssm_norm", STATE)
    file.rows(f"{prefix}.ssm_out", HIDDEN, VALUE_WIDTH)


def qwen35(file: FamilyFile, layer: int) -> None:
    _mixer(file, layer)
    add_dense(file, layer)


def qwen35moe(file: FamilyFile, layer: int) -> None:
    _mixer(file, layer)
    add_gated_experts(file, layer)


def qwen3next(file: FamilyFile, layer: int) -> None:
    qwen35moe(file, layer)
    prefix = f"blk.{layer}.ssm"
    if f"{prefix}_beta.weight" in file.values:
        file.interleave(
            f"{prefix}_ba.weight", KEY_HEADS, f"{prefix}_beta.weight", f"{prefix}_alpha.weight"
        )


def lfm2(file: FamilyFile, layer: int) -> None:
    """Every second layer attends, the others convolve."""
    prefix = f"blk.{layer}"
    file.vector(f"{prefix}.ffn_norm")
    add_dense(file, layer)
    if layer % 2:
        add_attention(file, layer, norms=True)
    else:
        file.vector(f"{prefix}.attn_norm")
        file.rows(f"{prefix}.shortconv.conv", HIDDEN, TAPS)
        file.rows(f"{prefix}.shortconv.in_proj", 3 * HIDDEN)
        file.rows(f"{prefix}.shortconv.out_proj", HIDDEN)
    if layer == 0:
        file.values["token_embd_norm.weight"] = file.values.pop("output_norm.weight")


def lfm2moe(file: FamilyFile, layer: int) -> None:
    """Experts in all but the first layer."""
    lfm2(file, layer)
    if layer < file.keys["leading_dense_block_count"]:
        return
    for name in ("gate", "up", "down"):
        del file.values[f"blk.{layer}.ffn_{name}.weight"]
    add_experts(file, layer)
    file.add(f"blk.{layer}.exp_probs_b.bias", EXPERTS)


def granitehybrid(file: FamilyFile, layer: int) -> None:
    """Every second layer attends, the others are Mamba-2."""
    file.vector(f"blk.{layer}.ffn_norm")
    add_dense(file, layer)
    if layer % 2:
        add_attention(file, layer)
    else:
        mamba2(file, layer)


def falcon_h1(file: FamilyFile, layer: int) -> None:
    """Every layer attends and is a Mamba-2 of the same norm; one name has no suffix."""
    file.add(f"blk.{layer}.ffn_norm", HIDDEN)
    add_dense(file, layer)
    add_attention(file, layer)
    mamba2(file, layer)


def nemotron_h(file: FamilyFile, layer: int) -> None:
    """Every layer is one block: a Mamba-2, one that attends, two dense ones without gates."""
    if layer % 2:
        file.vector(f"blk.{layer}.attn_norm")
        file.rows(f"blk.{layer}.ffn_up", FEED_FORWARD)
        file.rows(f"blk.{layer}.ffn_down", HIDDEN, FEED_FORWARD)
    elif layer:
        add_attention(file, layer)
    else:
        mamba2(file, layer)


def nemotron_h_moe(file: FamilyFile, layer: int) -> None:
    """Experts without gates beside a shared one in place of dense blocks."""
    nemotron_h(file, layer)
    if not layer % 2:
        return
    prefix = f"blk.{layer}"
    del file.values[f"{prefix}.ffn_up.weight"], file.values[f"{prefix}.ffn_down.weight"]
    add_experts(file, layer)
    add_shared_expert(file, layer, SHARED_WIDTH)
    for kind in ("exps", "shexp"):
        del file.values[f"{prefix}.ffn_gate_{kind}.weight"]
    file.add(f"{prefix}.exp_probs_b.bias", EXPERTS)


def mamba2(file: FamilyFile, layer: int) -> None:
    """A Mamba-2 and nothing else."""
    prefix, inner, channels = f"blk.{layer}", 2 * HIDDEN, 2 * HIDDEN + 2 * STATE
    file.vector(f"{prefix}.attn_norm")
    file.rows(f"{prefix}.ssm_in", inner + channels + MAMBA_HEADS)
    file.rows(f"{prefix}.ssm_conv1d", channels, TAPS)
    file.add(f"{prefix}.ssm_conv1d.bias", channels)
    file.add(f"{prefix}.ssm_dt.bias", MAMBA_HEADS)
    file.add(f"{prefix}.ssm_a", MAMBA_HEADS, 1)
    file.add(f"{prefix}.ssm_d", MAMBA_HEADS, 1)
    file.rows(f"{prefix}.ssm_norm", 1, inner)
    file.rows(f"{prefix}.ssm_out", HIDDEN, inner)
