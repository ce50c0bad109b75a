"""Small random-weight files of every family, as dictionaries a test can change before writing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.model.family_file import HIDDEN, VOCAB, FamilyFile
from tests.model.family_parts import (
    EXPERT_WIDTH,
    EXPERTS,
    FEED_FORWARD,
    FULL_HEAD_DIM,
    FULL_KV_HEADS,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    KV_HEADS,
    LAYER_NORM,
    LAYERS,
    MAMBA_HEADS,
    SHARED_WIDTH,
    STATE,
    TAPS,
    USED,
    VALUE_HEADS,
    VALUE_WIDTH,
    WINDOW,
    add_attention,
    add_biases,
    add_dense,
    add_experts,
    add_gated_experts,
    add_shared_expert,
)
from tests.model.latent_layers import LATENT_KEYS, deepseek2
from tests.model.later_layers import (
    APERTUS_KEYS,
    LAYER_NORMED,
    LAYER_NORMED_KEYS,
    LIKE_LLAMA,
    LLAMA4_KEYS,
    apertus,
    llama4,
)
from tests.model.mixture_layers import afmoe, bailingmoe2, dots1, ernie_moe, soft_routed
from tests.model.recurrent_layers import (
    falcon_h1,
    granitehybrid,
    lfm2,
    lfm2moe,
    mamba2,
    nemotron_h,
    nemotron_h_moe,
    qwen3next,
    qwen35,
    qwen35moe,
)


def family_file(architecture: str, **keys: Any) -> FamilyFile:
    """The file of an architecture with its usual parts; ``keys`` change or add metadata."""
    file = FamilyFile(architecture, {**_common_keys(), **_KEYS.get(architecture, {})})
    file.keys.update({name.replace("__", "."): value for name, value in keys.items()})
    if architecture in ("command-r", "cohere2", *LAYER_NORMED):
        file.keys[LAYER_NORM] = file.keys.pop("attention.layer_norm_rms_epsilon")
    file.rows("token_embd", VOCAB)
    file.vector("output_norm")
    for layer in range(file.keys["block_count"]):
        _LAYERS[architecture](file, layer)
    return file


def _common_keys() -> dict[str, Any]:
    return {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }


EXPERT_KEYS = {
    "expert_count": EXPERTS,
    "expert_used_count": USED,
    "expert_feed_forward_length": EXPERT_WIDTH,
}
_HYBRID_KEYS = {
    "rope.dimension_count": 8,
    "rope.freq_base": 1e5,
    "full_attention_interval": 2,
    "ssm.conv_kernel": TAPS,
    "ssm.inner_size": VALUE_WIDTH,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.group_count": KEY_HEADS,
}
_SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}
_EQUAL_SECTIONS = {"rope.dimension_sections": [16, 24, 24, 0]}
_SHARED_KEYS = {"expert_shared_feed_forward_length": SHARED_WIDTH}
_CONVOLVING_KEYS = {"attention.head_count_kv": [0, KV_HEADS] * 2, "shortconv.l_cache": TAPS}
_GRANITE_KEYS = {"logit_scale": 4.0, "residual_scale": 0.5, "embedding_scale": 3.0}
_MAMBA_KEYS = {"ssm.conv_kernel": TAPS, "ssm.inner_size": 2 * HIDDEN, "ssm.state_size": STATE,
               "ssm.time_step_rank": MAMBA_HEADS, "ssm.group_count": 1}  # fmt: skip
_ALTERNATING = {"attention.head_count_kv": [0, 0, KV_HEADS, 0],
                "feed_forward_length": [0, FEED_FORWARD, 0, FEED_FORWARD]}  # fmt: skip
_ROUTED_KEYS = {**EXPERT_KEYS, "leading_dense_block_count": 1, "expert_shared_count": 1,
                "expert_weights_norm": True, "expert_gating_func": 2}  # fmt: skip
_KEYS: Mapping[str, dict[str, Any]] = {
    "granite": _GRANITE_KEYS,
    "granitemoe": {**_GRANITE_KEYS, **_SHARED_KEYS, "expert_count": EXPERTS,
                   "expert_used_count": USED},
    "minimax-m2": {**EXPERT_KEYS, "expert_gating_func": 2, "rope.dimension_count": HEAD_DIM // 2},
    "qwen3moe": EXPERT_KEYS,
    "qwen2vl": _EQUAL_SECTIONS,
    "qwen3vl": {**_EQUAL_SECTIONS, "n_deepstack_layers": 3},
    "qwen3vlmoe": {**_EQUAL_SECTIONS, **EXPERT_KEYS, "n_deepstack_layers": 3},
    "qwen2moe": {**EXPERT_KEYS, **_SHARED_KEYS},
    "olmoe": {"expert_count": EXPERTS, "expert_used_count": USED},
    "qwen35": {**_HYBRID_KEYS, **_SECTIONS},
    "qwen35moe": {**_HYBRID_KEYS, **_SECTIONS, **EXPERT_KEYS, **_SHARED_KEYS},
    "qwen3next": {**_HYBRID_KEYS, **EXPERT_KEYS, **_SHARED_KEYS},
    "command-r": {"logit_scale": 0.5},
    **LAYER_NORMED_KEYS,
    "deepseek2": {**EXPERT_KEYS, **LATENT_KEYS},
    "glm4moe": {**EXPERT_KEYS, "leading_dense_block_count": 1, "expert_shared_count": 1,
                "expert_weights_norm": True, "rope.dimension_count": HEAD_DIM // 2},
    "cohere2": {"logit_scale": 0.5, "attention.sliding_window": WINDOW},
    "gpt-oss": {**EXPERT_KEYS, "attention.sliding_window": WINDOW},
    "granitehybrid": {**_GRANITE_KEYS, "rope.scaling.finetuned": False,
                      "attention.head_count_kv": [0, KV_HEADS] * 2, **_MAMBA_KEYS},
    "falcon-h1": _MAMBA_KEYS,
    "mamba2": {**_MAMBA_KEYS, "attention.head_count": 0, "feed_forward_length": 0},
    "nemotron_h": {**_MAMBA_KEYS, **_ALTERNATING},
    "nemotron_h_moe": {**_MAMBA_KEYS, **_ALTERNATING, **EXPERT_KEYS, **_SHARED_KEYS},
    "lfm2": _CONVOLVING_KEYS,
    "lfm2moe": {**_CONVOLVING_KEYS, **EXPERT_KEYS, "expert_gating_func": 2,
                "leading_dense_block_count": 1},
    "dots1": _ROUTED_KEYS,
    "deepseek": {**_ROUTED_KEYS, "expert_gating_func": 1, "expert_weights_norm": False},
    "bailingmoe": {**_ROUTED_KEYS, "expert_gating_func": 1, "leading_dense_block_count": 0},
    "chatglm": {"rope.dimension_count": HEAD_DIM // 2},
    "minicpm": _GRANITE_KEYS,
    "ernie4_5-moe": {**EXPERT_KEYS, **_SHARED_KEYS, "leading_dense_block_count": 1,
                     "interleave_moe_layer_step": 1},
    "bailingmoe2": {**_ROUTED_KEYS, "rope.dimension_count": HEAD_DIM // 2,
                    "expert_group_count": 2, "expert_group_used_count": 1},
    "exaone-moe": {**_ROUTED_KEYS, "attention.sliding_window": WINDOW},
    "afmoe": {**_ROUTED_KEYS, "attention.sliding_window": WINDOW},
    "apertus": APERTUS_KEYS,
    "llama4": LLAMA4_KEYS,
    "hunyuan-moe": {**EXPERT_KEYS, **_SHARED_KEYS},
    "gemma2": {"attention.sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    "gemma3": {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2,
               "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "gemma4": {"attention.sliding_window": WINDOW,
               "attention.sliding_window_pattern": [True, False, True, False],
               "attention.head_count_kv": [KV_HEADS, FULL_KV_HEADS] * 2,
               "attention.key_length": FULL_HEAD_DIM, "attention.value_length": FULL_HEAD_DIM,
               "attention.key_length_swa": HEAD_DIM, "attention.value_length_swa": HEAD_DIM,
               "rope.dimension_count": FULL_HEAD_DIM, "rope.dimension_count_swa": HEAD_DIM,
               "rope.freq_base": 1e6, "embedding_length_per_layer_input": 0},
}  # fmt: skip


def _llama(file: FamilyFile, layer: int, norms: bool = False) -> None:
    add_attention(file, layer, norms=norms)
    file.vector(f"blk.{layer}.ffn_norm")
    add_dense(file, layer)


def _qwen2(file: FamilyFile, layer: int) -> None:
    _llama(file, layer)
    add_biases(file, layer)


def _glm4(file: FamilyFile, layer: int) -> None:
    _phi3(file, layer)
    for name in ("post_attention_norm", "post_ffw_norm"):
        file.vector(f"blk.{layer}.{name}")


def _phi3(file: FamilyFile, layer: int) -> None:
    """Gate rows, then up rows, are one tensor."""
    _llama(file, layer)
    prefix = f"blk.{layer}.ffn"
    file.stack(f"{prefix}_up.weight", f"{prefix}_gate.weight", f"{prefix}_up.weight")


def _cohere(file: FamilyFile, layer: int) -> None:
    """One norm before both blocks."""
    add_attention(file, layer)
    add_dense(file, layer)


def _exaone4(file: FamilyFile, layer: int) -> None:
    """Norms after the blocks, and of each head."""
    add_attention(file, layer, norms=True)
    add_dense(file, layer)
    del file.values[f"blk.{layer}.attn_norm.weight"]
    for name in ("post_attention_norm", "post_ffw_norm"):
        file.vector(f"blk.{layer}.{name}")


def _olmo2(file: FamilyFile, layer: int) -> None:
    """Norms after the blocks, and over all heads at once."""
    _exaone4(file, layer)
    _whole_norms(file, layer)


def _whole_norms(file: FamilyFile, layer: int) -> None:
    file.vector(f"blk.{layer}.attn_q_norm", HEADS * HEAD_DIM)
    file.vector(f"blk.{layer}.attn_k_norm", KV_HEADS * HEAD_DIM)


def _seed_oss(file: FamilyFile, layer: int) -> None:
    """Biases, and another name of the norm before the dense block."""
    _qwen2(file, layer)
    name = f"blk.{layer}.{{}}.weight".format
    file.values[name("post_attention_norm")] = file.values.pop(name("ffn_norm"))


def _granitemoe(file: FamilyFile, layer: int) -> None:
    """Experts as wide as dense blocks, beside a shared one."""
    add_attention(file, layer)
    file.vector(f"blk.{layer}.ffn_norm")
    add_experts(file, layer, FEED_FORWARD)
    add_shared_expert(file, layer, SHARED_WIDTH)


def _minimax_m2(file: FamilyFile, layer: int) -> None:
    """Norms over all heads at once, experts chosen by a bias."""
    _qwen3moe(file, layer)
    _whole_norms(file, layer)
    file.add(f"blk.{layer}.exp_probs_b.bias", EXPERTS)


def _qwen3(file: FamilyFile, layer: int) -> None:
    _llama(file, layer, norms=True)


def _hunyuan_moe(file: FamilyFile, layer: int) -> None:
    """Experts beside a shared one without a gate."""
    _qwen3moe(file, layer)
    add_shared_expert(file, layer, SHARED_WIDTH)


def _qwen3moe(file: FamilyFile, layer: int) -> None:
    add_attention(file, layer, norms=True)
    file.vector(f"blk.{layer}.ffn_norm")
    add_experts(file, layer)


def _glm4moe(file: FamilyFile, layer: int) -> None:
    """Experts beside a shared one in all but the first layer."""
    _seed_oss(file, layer)
    prefix = f"blk.{layer}"
    if layer < file.keys["leading_dense_block_count"]:
        return
    for name in ("gate", "up", "down"):
        del file.values[f"{prefix}.ffn_{name}.weight"]
    add_experts(file, layer)
    add_shared_expert(file, layer, EXPERT_WIDTH)
    file.add(f"{prefix}.exp_probs_b.bias", EXPERTS)


def _gpt_oss(file: FamilyFile, layer: int) -> None:
    """Sinks, and a bias for every matrix of a layer."""
    prefix = f"blk.{layer}"
    add_attention(file, layer)
    file.vector(f"{prefix}.post_attention_norm")
    file.vector(f"{prefix}.attn_sinks", HEADS)
    add_experts(file, layer)
    add_biases(file, layer)
    file.add(f"{prefix}.attn_output.bias", HIDDEN)
    file.add(f"{prefix}.ffn_gate_inp.bias", EXPERTS)
    for name, width in {"gate": EXPERT_WIDTH, "up": EXPERT_WIDTH, "down": HIDDEN}.items():
        file.add(f"{prefix}.ffn_{name}_exps.bias", EXPERTS, width)


def _qwen2moe(file: FamilyFile, layer: int) -> None:
    """Biases, and experts beside a gated one."""
    add_attention(file, layer)
    add_biases(file, layer)
    file.vector(f"blk.{layer}.ffn_norm")
    add_gated_experts(file, layer)


def _olmoe(file: FamilyFile, layer: int) -> None:
    """Norms over all heads at once, experts as wide as dense blocks."""
    add_attention(file, layer, norms=True)
    _whole_norms(file, layer)
    file.vector(f"blk.{layer}.ffn_norm")
    add_experts(file, layer, FEED_FORWARD)


def _gemma3(file: FamilyFile, layer: int) -> None:
    _gemma2(file, layer, norms=True)


def _gemma2(file: FamilyFile, layer: int, norms: bool = False) -> None:
    _llama(file, layer, norms=norms)
    file.vector(f"blk.{layer}.post_attention_norm")
    file.vector(f"blk.{layer}.post_ffw_norm")


def _gemma4(file: FamilyFile, layer: int) -> None:
    """Full layers take their values from the keys; the last layer scales its output."""
    prefix = f"blk.{layer}"
    sliding = file.keys["attention.sliding_window_pattern"][layer]
    size = HEAD_DIM if sliding else FULL_HEAD_DIM
    kv_width = size * file.keys["attention.head_count_kv"][layer]
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        file.vector(f"{prefix}.{name}")
    file.rows(f"{prefix}.attn_q", HEADS * size)
    file.rows(f"{prefix}.attn_k", kv_width)
    if sliding:
        file.rows(f"{prefix}.attn_v", kv_width)
    file.rows(f"{prefix}.attn_output", HIDDEN, HEADS * size)
    file.vector(f"{prefix}.attn_q_norm", size)
    file.vector(f"{prefix}.attn_k_norm", size)
    add_dense(file, layer)
    if layer % 2:
        file.add(f"{prefix}.layer_output_scale.weight", 1)
    pairs = FULL_HEAD_DIM // 2
    divisors = np.where(np.arange(pairs) < pairs // 4, 1.0, 1e30)
    file.values["rope_freqs.weight"] = divisors.astype(np.float32)


_LAYERS = {
    "llama": _llama,
    "apertus": apertus,
    "llama4": llama4,
    "mistral3": _llama,
    "smollm3": _llama,
    "ernie4_5": _llama,
    "exaone4": _exaone4,
    "granite": _llama,
    "granitemoe": _granitemoe,
    "glm4": _glm4,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "qwen2vl": _qwen2,
    "qwen3vl": _qwen3,
    "qwen3vlmoe": _qwen3moe,
    "qwen2moe": _qwen2moe,
    "olmoe": _olmoe,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "qwen3next": qwen3next,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "granitehybrid": granitehybrid,
    "falcon-h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h_moe,
    "dots1": dots1,
    "ernie4_5-moe": ernie_moe,
    "bailingmoe2": bailingmoe2,
    "exaone-moe": dots1,
    "afmoe": afmoe,
    "internlm2": _llama,
    "minicpm": _llama,
    "hunyuan-dense": _qwen3,
    "hunyuan-moe": _hunyuan_moe,
    "gemma": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "deepseek2": deepseek2,
    "glm4moe": _glm4moe,
    "minimax-m2": _minimax_m2,
    "seed_oss": _seed_oss,
    "command-r": _cohere,
    "cohere2": _cohere,
    **LAYER_NORMED,
    **LIKE_LLAMA,
    **dict.fromkeys(("deepseek", "bailingmoe"), soft_routed),
    "mamba2": mamba2,
}
