"""The random-weight models whose files, graphs and logits ``goldens/synthetic.json`` holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.synth.sizes import sized_spec

_SYNTHETIC_VARIANTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"quant": "f32"},
        {"quant": "q4_k_m", "tied": False, "rope_freqs": True},
        {"quant": "q4_0", "attention_output_bias": True},
        {"quant": "q4_1", "rope_scaling": "linear"},
        {"quant": "q5_k", "head_dim": 32},
        {"quant": "q4_k", "experts": {"count": 8, "used": 2, "width": 256}},
        {"quant": "q2_k"},
        {"quant": "iq4_nl", "tied": False},
    ),
    "mistral3": (
        {"quant": "q4_k_m", "rope_scaling": "yarn", "rope_original_context": 8, "tied": False}
        | {"query_growth": 0.25, "yarn_log_multiplier": 1.0},
    ),
    "apertus": ({"quant": "q4_k_m", "tied": False, "rope_freqs": True},),
    "llama4": (
        {"quant": "q4_k_m", "layers": 4, "window": 12, "rope_original_context": 6}
        | {"query_growth": 0.25, "experts": {"every": 2}},
    ),
    "smollm3": ({"quant": "q4_k_m", "layers": 5},),
    "granite": ({"quant": "q4_k", "tied": False},),
    "glm4": ({"quant": "q5_k", "tied": False, "qkv_bias": True},),
    "phi3": ({"quant": "q4_k_m", "long_rope": True, "window": 12},),
    "olmo2": ({"quant": "q4_k_m", "tied": False, "layers": 5, "window": 12},),
    "command-r": ({"quant": "q8_0", "logit_scale": 0.0625},),
    "cohere2": ({"quant": "q4_k_m", "layers": 5, "window": 12, "logit_scale": 0.25},),
    "exaone": ({"quant": "q4_k_m", "rope_freqs": True},),
    "chatglm": ({"quant": "q4_k_m", "tied": False},),
    "arcee": ({"quant": "q5_k", "tied": False},),
    "baichuan": ({"quant": "q4_k_m"},),
    "falcon": ({"quant": "q4_k_m"}, {"quant": "q8_0", "parallel": True}),
    "nemotron": ({"quant": "q4_k_m"},),
    "olmo": ({"quant": "q4_k_m"},),
    "gpt2": ({"quant": "q4_k_m"},),
    "starcoder": ({"quant": "q8_0"},),
    "mistral4": ({"quant": "q4_k_m", "rope_scaling": "yarn", "tied": False},),
    "hy_v3": ({"quant": "q4_k_m", "experts": {"shared_width": 128}},),
    "mellum": ({"quant": "q4_k_m", "layers": 5, "window": 12},),
    "smallthinker": ({"quant": "q4_k_m", "layers": 5, "window": 12},),
    "starcoder2": ({"quant": "q4_k_m"},),
    "stablelm": (
        {"quant": "q4_k_m", "qkv_bias": True},
        {"quant": "q8_0", "parallel": True},
        {"quant": "q4_k", "parallel": True, "head_norms": True},
    ),
    "phi2": ({"quant": "q5_k", "fused_qkv": True},),
    "gptneox": ({"quant": "q4_k_m", "fused_qkv": True, "parallel": True},),
    "qwen2": (
        {"quant": "f16"},
        {"quant": "q5_0", "tied": False},
        {"quant": "q5_1", "fused_qkv": True},
        {"quant": "q4_k", "feed_forward": (512, 1280)},
        {"quant": "q3_k"},
        {"quant": "mxfp4", "tied": False},
    ),
    "qwen3": (
        {"quant": "bf16", "rope_scaling": "yarn"},
        {"quant": "q8_0", "head_dim": 48},
        {"quant": "q6_k", "tied": False},
        {"quant": "q4_k_m", "hidden": 1280, "heads": 8, "rope_base": 1e6},
        {"quant": "iq4_xs", "tied": False},
    ),
    "qwen2vl": ({"quant": "q4_k_m", "tied": False},),
    "qwen3vl": ({"quant": "q5_k"},),
    "qwen3vlmoe": ({"quant": "q4_k_m", "tied": False, "experts": {"width": 96}},),
    "qwen3moe": (
        {"quant": "f32", "experts": {"count": 12, "used": 3, "width": 96}},
        {"quant": "q4_k_m", "tied": False, "fused_qkv": True, "experts": {"width": 256}},
    ),
    "qwen35": (
        {"quant": "f32", "recurrent": {"interval": 3, "value_heads": 6}},
        {"quant": "q8_0", "tied": False, "recurrent": {"listed": True, "value_heads": 2}},
        {"quant": "q4_k_m", "nextn_layers": 1, "recurrent": {"state": 64}},
    ),
    "qwen35moe": (
        {"quant": "q4_k_m", "recurrent": {"interval": 3, "value_heads": 6}},
        {"quant": "bf16", "experts": {"count": 12, "used": 3, "fused": True}},
    ),
    "qwen3next": (
        {"quant": "q5_k", "experts": {"width": 256, "shared_width": 256}},
        {"quant": "q6_k", "recurrent": {"packing": "ssm_in", "value_heads": 6}},
    ),
    "lfm2": (
        {"quant": "q4_k_m", "short_conv": {"kernel": 4}},
        {"quant": "f32", "tied": False, "layers": 4, "short_conv": {"interval": 2}},
    ),
    "lfm2moe": (
        {"quant": "q4_k_m", "layers": 4, "experts": {"width": 96}},
        {"quant": "f32", "tied": False, "leading_dense": 2},
    ),
    "granitehybrid": (
        {"quant": "q4_k_m", "layers": 4},
        {"quant": "f32", "tied": False, "experts": {"width": 96, "shared_width": 64}},
    ),
    "falcon-h1": (
        {"quant": "q4_k_m", "mamba": {"inner": 384, "normed": False}},
        {"quant": "f32", "tied": False, "mamba": {"groups": 2}},
    ),
    "deepseek": ({"quant": "q4_k_m", "tied": False, "experts": {"shared_width": 128}},),
    "bailingmoe": ({"quant": "q4_k_m", "experts": {"shared_width": 128}},),
    "mamba2": ({"quant": "q4_k_m", "mamba": {"groups": 2}},),
    "nemotron_h": ({"quant": "q4_k_m", "tied": False},),
    "nemotron_h_moe": ({"quant": "q4_k_m", "experts": {"width": 96, "shared_width": 64}},),
    "hunyuan-dense": ({"quant": "q4_k_m", "rope_base": 1e6},),
    "hunyuan-moe": ({"quant": "q4_k_m", "experts": {"width": 96, "shared_width": 64}},),
    "dots1": ({"quant": "q4_k_m", "tied": False, "experts": {"shared_width": 128}},),
    "internlm2": ({"quant": "q4_k_m", "tied": False},),
    "minicpm": ({"quant": "q4_k_m"},),
    "gemma": ({"quant": "q4_k_m"},),
    "gemma2": ({"quant": "q4_k_m", "layers": 3, "gemma": {"window": 12, "softcap": 20.0}},),
    "gemma3": (
        {"quant": "f16", "gemma": {"window": 12}},
        {
            "quant": "q4_k_m",
            "tied": False,
            "layers": 4,
            "rope_scaling": "linear",
            "gemma": {"window": 7, "period": 3, "softcap": 20.0},
        },
        {"quant": "q5_0", "gemma": {"window": 0}},
    ),
    "gpt-oss": ({"quant": "mxfp4_moe", "tied": False, "window": 12, "rope_scaling": "yarn"},),
    "ernie4_5": ({"quant": "q8_0"},),
    "exaone4": ({"quant": "q4_k_m", "tied": False, "layers": 5, "window": 12, "rope_freqs": True},),
    "granitemoe": ({"quant": "q4_k_m", "experts": {"width": 96, "shared_width": 64}},),
    "ernie4_5-moe": ({"quant": "q4_k_m", "experts": {"width": 96, "shared_width": 64}},),
    "bailingmoe2": ({"quant": "q4_k_m", "tied": False, "expert_groups": 4},),
    "exaone-moe": ({"quant": "q8_0", "tied": False, "layers": 5, "window": 12},),
    "afmoe": ({"quant": "q4_k_m", "layers": 5, "window": 12},),
    "minimax-m2": ({"quant": "q4_k_m", "tied": False, "experts": {"width": 96}},),
    "seed_oss": ({"quant": "q5_k", "tied": False},),
    "qwen2moe": ({"quant": "q4_k_m", "tied": False, "experts": {"width": 96}},),
    "olmoe": ({"quant": "q4_k_m", "tied": False, "experts": {"width": 96}},),
    "deepseek2": (
        {"quant": "q4_k_m", "tied": False, "latent": {"groups": 4, "groups_used": 2}},
        {
            "quant": "q8_0",
            "experts": None,
            "leading_dense": 0,
            "latent": {"rank": 512, "unrotated": 128, "rotated": 64, "query_rank": 0},
        },
    ),
    "glm4moe": (
        {"quant": "q4_k_m", "tied": False, "nextn_layers": 1, "experts": {"shared_width": 128}},
    ),
    "gemma3n": (
        {"quant": "q4_k_m", "layers": 3, "gemma": {"window": 12, "per_layer_width": 64}},
        {
            "quant": "q8_0",
            "layers": 6,
            "gemma": {"window": 9, "per_layer_width": 64, "shared_kv_layers": 2, "softcap": 20.0},
        },
    ),
    "gemma4": (
        {"quant": "f32", "gemma": {"window": 12}},
        {
            "quant": "q4_k_m",
            "experts": {"width": 256, "fused": True},
            "gemma": {"window": 12, "values_from_keys": True},
        },
        {
            "quant": "q8_0",
            "layers": 6,
            "feed_forward": (512, 512, 512, 768, 768, 768),
            "gemma": {"window": 9, "period": 2, "shared_kv_layers": 2, "per_layer_width": 64},
        },
    ),
}
SYNTHETIC_SPECS = tuple(
    sized_spec("tiny", architecture=architecture, seed=number, **fields)
    for architecture, variants in _SYNTHETIC_VARIANTS.items()
    for number, fields in enumerate(variants)
)
