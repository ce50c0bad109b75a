"""One small model of every architecture and structural variant, for the tests of whole models.

A new family or variant goes in here: the tests against llama.cpp and float64 and the digest of the
generated files take it from here. Widths are multiples of 32 and not of 256, so that quantized
files hold the fallback types as well."""

from collections.abc import Mapping
from typing import Any

SMALL = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "feed_forward": 256}
EXPERTS = {"count": 12, "used": 3, "width": 96}
SHARED = {**EXPERTS, "shared_width": 160}
DELTA_NET = {"interval": 3, "state": 32, "key_heads": 2, "value_heads": 6}
HYBRID = {**SMALL, "layers": 4, "recurrent": DELTA_NET}
WINDOWS = {"window": 20, "period": 3}
LATENT = {"rank": 64, "query_rank": 96, "unrotated": 32, "rotated": 16, "value": 32}
GPT_OSS = {
    "architecture": "gpt-oss", **SMALL, "tied": False, "window": 20, "rope_base": 1.5e5,
    "experts": EXPERTS,
}  # fmt: skip
GEMMA3 = {**SMALL, "architecture": "gemma3", "layers": 4, "gemma": WINDOWS}
GEMMA4_WINDOWS = {**WINDOWS, "head_dim": 16, "kv_heads": 4, "output_scale": True}
GEMMA4 = {**SMALL, "architecture": "gemma4", "layers": 4, "gemma": GEMMA4_WINDOWS}

PLAIN = ("granite", "minicpm", "qwen2", "qwen3")
UNTIED = ("chatglm", "arcee", "nemotron", "glm4", "phi3")
DENSE: Mapping[str, Mapping[str, Any]] = {
    **{name: {"architecture": name, **SMALL} for name in PLAIN},
    **{name: {"architecture": name, **SMALL, "tied": False} for name in UNTIED},
    "llama": {"architecture": "llama", **SMALL},
    "deepseek2": {
        "architecture": "deepseek2", **SMALL, "leading_dense": 0, "experts": None,
        "latent": {**LATENT, "rank": 512, "unrotated": 64, "rotated": 64},
    },
    "llama-untied-mha": {"architecture": "llama", **SMALL, "kv_heads": 4, "tied": False},
    "llama-rope-freqs": {"architecture": "llama", **SMALL, "rope_freqs": True, "rope_base": 5e5},
    "llama-linear": {"architecture": "llama", **SMALL, "rope_scaling": "linear"},
    "llama-yarn": {"architecture": "llama", **SMALL, "rope_scaling": "yarn"},
    "llama-odd-widths": {
        "architecture": "llama", "hidden": 144, "heads": 6, "kv_heads": 2, "head_dim": 24,
        "feed_forward": 300, "vocab": 333, "layers": 3,
    },
    "llama-spans": {"architecture": "llama", **SMALL, "hidden": 1280, "feed_forward": 2100},
    "llama-per-layer-widths": {"architecture": "llama", **SMALL, "feed_forward": (256, 192)},
    "llama-biases": {
        "architecture": "llama", **SMALL, "qkv_bias": True, "attention_output_bias": True,
    },
    "llama-fused-qkv": {"architecture": "llama", **SMALL, "fused_qkv": True},
    "apertus": {
        "architecture": "apertus", **SMALL, "tied": False, "layers": 3, "rope_freqs": True,
        "rope_base": 1.2e7,
    },
    "mistral3": {
        "architecture": "mistral3", **SMALL, "tied": False, "rope_base": 1e6,
        "rope_scaling": "yarn", "rope_factor": 16.0, "rope_original_context": 32,
        "query_growth": 0.1, "yarn_log_multiplier": 1.0,
    },
    "mistral3-half-multiplier": {
        "architecture": "mistral3", **SMALL, "rope_scaling": "yarn", "rope_original_context": 24,
        "query_growth": 0.5, "yarn_log_multiplier": 0.5,
    },
    "smollm3": {"architecture": "smollm3", **SMALL, "layers": 5, "rope_base": 5e6},
    "granite-plain-scores": {
        "architecture": "granite", **SMALL, "tied": False,
        "scales": {"embedding": 1.0, "residual": 1.0, "attention": 0.25, "logits": 3.0},
    },
    "glm4-biases": {"architecture": "glm4", **SMALL, "tied": False, "qkv_bias": True},
    "phi3-long-rope": {"architecture": "phi3", **SMALL, "long_rope": True},
    "phi3-separate-qkv": {"architecture": "phi3", **SMALL, "fused_qkv": False},
    "phi3-window": {"architecture": "phi3", **SMALL, "window": 20},
    "exaone4": {"architecture": "exaone4", **SMALL, "rope_freqs": True, "rope_base": 1e6},
    "exaone4-windows": {
        "architecture": "exaone4", **SMALL, "tied": False, "layers": 5, "window": 20,
    },
    "ernie4_5": {"architecture": "ernie4_5", **SMALL, "rope_base": 5e5},
    "seed_oss": {"architecture": "seed_oss", **SMALL, "tied": False, "rope_base": 1e7},
    "olmo2": {"architecture": "olmo2", **SMALL, "tied": False, "rope_base": 5e5},
    "olmo2-windows": {
        "architecture": "olmo2", **SMALL, "tied": False, "layers": 5, "window": 20,
    },
    "qwen2-untied-mqa": {"architecture": "qwen2", **SMALL, "kv_heads": 1, "tied": False},
    "qwen2vl": {"architecture": "qwen2vl", **SMALL, "tied": False, "rope_base": 1e6},
    "qwen3vl": {"architecture": "qwen3vl", **SMALL, "rope_base": 5e6},
    "hunyuan-dense": {"architecture": "hunyuan-dense", **SMALL, "rope_base": 1e6},
    "internlm2": {"architecture": "internlm2", **SMALL, "tied": False, "rope_base": 1e6},
    "command-r": {"architecture": "command-r", **SMALL, "logit_scale": 0.5, "rope_base": 8e6},
    "cohere2": {
        "architecture": "cohere2", **SMALL, "layers": 5, "window": 20, "logit_scale": 0.25,
        "rope_base": 5e4,
    },
    "starcoder2": {"architecture": "starcoder2", **SMALL, "rope_base": 1e6},
    "stablelm": {"architecture": "stablelm", **SMALL, "tied": False, "qkv_bias": True},
    "stablelm-parallel": {"architecture": "stablelm", **SMALL, "tied": False, "parallel": True},
    "phi2": {"architecture": "phi2", **SMALL, "kv_heads": 4, "tied": False, "fused_qkv": True},
    "gptneox": {
        "architecture": "gptneox", **SMALL, "kv_heads": 4, "tied": False, "fused_qkv": True,
    },
    "gptneox-parallel": {
        "architecture": "gptneox", **SMALL, "kv_heads": 4, "tied": False, "fused_qkv": True,
        "parallel": True,
    },
    "exaone": {"architecture": "exaone", **SMALL, "rope_freqs": True, "rope_base": 1e6},
    "baichuan": {"architecture": "baichuan", **SMALL, "kv_heads": 4, "tied": False},
    "falcon": {"architecture": "falcon", **SMALL, "kv_heads": 1},
    "falcon-parallel": {"architecture": "falcon", **SMALL, "parallel": True},
    "olmo": {"architecture": "olmo", **SMALL, "kv_heads": 4},
    "stablelm-head-norms": {
        "architecture": "stablelm", **SMALL, "tied": False, "parallel": True, "head_norms": True,
    },
    "gpt2": {"architecture": "gpt2", **SMALL, "kv_heads": 4, "fused_qkv": True},
    "starcoder": {"architecture": "starcoder", **SMALL, "kv_heads": 1, "fused_qkv": True},
    "qwen3-wide-heads": {"architecture": "qwen3", **SMALL, "head_dim": 80, "rope_base": 1e6},
}  # fmt: skip

MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "llama-experts": {"architecture": "llama", **SMALL, "experts": EXPERTS},
    "llama-8-experts": {"architecture": "llama", **SMALL, "experts": {**EXPERTS, "count": 8}},
    "llama4-experts": {
        "architecture": "llama4", **SMALL, "layers": 5, "tied": False, "rope_freqs": True,
        "rope_base": 5e5, "experts": {**EXPERTS, "used": 1, "shared_width": 96},
    },
    "llama4-experts-128": {
        "architecture": "llama4", **SMALL, "layers": 4,
        "experts": {"count": 128, "used": 1, "width": 32, "shared_width": 32, "every": 2},
    },
    "llama4-experts-two": {
        "architecture": "llama4", **SMALL, "layers": 4,
        "experts": {"count": 2, "used": 1, "width": 96, "shared_width": 96},
    },
    "llama4-experts-chunks": {
        "architecture": "llama4", **SMALL, "layers": 4, "window": 20,
        "rope_original_context": 12, "query_growth": 0.3,
        "experts": {**EXPERTS, "used": 1, "shared_width": 96, "every": 2},
    },
    "qwen3moe": {"architecture": "qwen3moe", **SMALL, "experts": EXPERTS},
    "qwen3moe-untied-fused-qkv": {
        "architecture": "qwen3moe", **SMALL, "tied": False, "fused_qkv": True,
        "experts": {**EXPERTS, "count": 32, "used": 8},
    },
    "qwen3vlmoe-experts": {
        "architecture": "qwen3vlmoe", **SMALL, "tied": False, "rope_base": 5e6,
        "experts": {**EXPERTS, "used": 8},
    },
    "glm4moe-experts": {
        "architecture": "glm4moe", **SMALL, "layers": 3, "tied": False, "leading_dense": 1,
        "experts": {**EXPERTS, "used": 6, "shared_width": 96}, "nextn_layers": 1,
    },
    "glm4moe-experts-head-norms": {
        "architecture": "glm4moe", **SMALL, "qkv_bias": False, "head_norms": True,
        "leading_dense": 0, "experts": {**EXPERTS, "shared_width": 192},
    },
    "deepseek2-experts": {
        "architecture": "deepseek2", **SMALL, "layers": 3, "tied": False, "leading_dense": 1,
        "latent": LATENT, "experts": {**EXPERTS, "used": 8, "shared_width": 96},
    },
    "deepseek2-experts-yarn": {
        "architecture": "deepseek2", **SMALL, "layers": 3, "leading_dense": 0, "latent": LATENT,
        "rope_scaling": "yarn", "rope_factor": 16.0, "rope_original_context": 32,
        "yarn_log_multiplier": 0.1, "experts": {**EXPERTS, "used": 10, "shared_width": 192},
    },
    "deepseek2-experts-groups": {
        "architecture": "deepseek2", **SMALL, "leading_dense": 1,
        "latent": {**LATENT, "groups": 3, "groups_used": 2},
        "experts": {**EXPERTS, "used": 6, "shared_width": 96},
    },
    "granitemoe-experts": {"architecture": "granitemoe", **SMALL, "experts": EXPERTS},
    "granitemoe-experts-shared": {
        "architecture": "granitemoe", **SMALL, "tied": False, "experts": SHARED,
    },
    "minimax-m2-experts": {
        "architecture": "minimax-m2", **SMALL, "tied": False, "rope_base": 5e6,
        "experts": {**EXPERTS, "used": 8},
    },
    "qwen2moe-experts": {
        "architecture": "qwen2moe", **SMALL, "tied": False, "experts": {**SHARED, "used": 6},
    },
    "olmoe-experts": {
        "architecture": "olmoe", **SMALL, "kv_heads": 4, "tied": False,
        "experts": {**EXPERTS, "used": 8},
    },
    "hunyuan-moe-experts": {
        "architecture": "hunyuan-moe", **SMALL, "tied": False, "experts": {**SHARED, "used": 8},
    },
    "dots1-experts": {
        "architecture": "dots1", **SMALL, "kv_heads": 4, "layers": 3, "tied": False,
        "leading_dense": 1, "experts": {**EXPERTS, "used": 10, "shared_width": 192},
    },
    "ernie4_5-moe-experts": {
        "architecture": "ernie4_5-moe", **SMALL, "layers": 3, "leading_dense": 1, "rope_base": 5e5,
        "experts": {**SHARED, "used": 8},
    },
    "bailingmoe2-experts": {
        "architecture": "bailingmoe2", **SMALL, "layers": 3, "tied": False, "rope_base": 6e5,
        "leading_dense": 1, "expert_groups": 4,
        "experts": {**EXPERTS, "used": 5, "shared_width": 96},
    },
    "exaone-moe-experts": {
        "architecture": "exaone-moe", **SMALL, "layers": 5, "tied": False, "window": 20,
        "rope_freqs": True, "experts": {**EXPERTS, "used": 8, "shared_width": 96},
    },
    "afmoe-experts": {
        "architecture": "afmoe", **SMALL, "layers": 5, "tied": False, "window": 20,
        "experts": {**EXPERTS, "used": 8, "shared_width": 96},
    },
    "deepseek-experts": {
        "architecture": "deepseek", **SMALL, "kv_heads": 4, "layers": 3, "tied": False,
        "leading_dense": 1, "experts": {**EXPERTS, "used": 8, "shared_width": 192},
    },
    "bailingmoe-experts": {
        "architecture": "bailingmoe", **SMALL, "tied": False, "rope_base": 6e5,
        "experts": {**EXPERTS, "used": 8, "shared_width": 192},
    },
    "mistral4-experts": {
        "architecture": "mistral4", **SMALL, "leading_dense": 0, "latent": LATENT,
        "rope_scaling": "yarn", "rope_factor": 16.0, "rope_original_context": 32,
        "yarn_log_multiplier": 0.1, "experts": {**EXPERTS, "used": 10, "shared_width": 96},
    },
    "hy_v3-experts": {
        "architecture": "hy_v3", **SMALL, "layers": 3, "tied": False, "leading_dense": 1,
        "experts": {**EXPERTS, "used": 11, "shared_width": 96},
    },
    "mellum-experts": {
        "architecture": "mellum", **SMALL, "layers": 5, "tied": False, "window": 20,
        "rope_scaling": "linear", "experts": {**EXPERTS, "used": 8},
    },
    "smallthinker-experts": {
        "architecture": "smallthinker", **SMALL, "experts": {**EXPERTS, "used": 10},
    },
    "smallthinker-experts-windows": {
        "architecture": "smallthinker", **SMALL, "layers": 5, "tied": False, "window": 20,
        "experts": {**EXPERTS, "used": 8},
    },
    "gpt-oss-experts": {**GPT_OSS, "experts": {**EXPERTS, "used": 4}},
    "gpt-oss-experts-yarn": {**GPT_OSS, "rope_scaling": "yarn", "rope_factor": 32.0},
}  # fmt: skip

HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "qwen35": {"architecture": "qwen35", **HYBRID},
    "qwen35-untied-equal-heads": {
        "architecture": "qwen35", **HYBRID, "tied": False,
        "recurrent": {**DELTA_NET, "value_heads": 2},
    },
    "qwen35-listed-layers": {
        "architecture": "qwen35", **HYBRID, "recurrent": {**DELTA_NET, "listed": True},
    },
    "qwen35-fused-qkv": {"architecture": "qwen35", **HYBRID, "fused_qkv": True},
    "qwen35-nextn": {"architecture": "qwen35", **HYBRID, "nextn_layers": 1},
    "qwen35moe": {"architecture": "qwen35moe", **HYBRID, "experts": SHARED},
    "qwen35moe-fused": {
        "architecture": "qwen35moe", **HYBRID, "experts": {**SHARED, "fused": True},
    },
    "qwen35moe-nextn": {
        "architecture": "qwen35moe", **HYBRID, "experts": SHARED, "nextn_layers": 1,
    },
    "qwen3next": {"architecture": "qwen3next", **HYBRID, "experts": SHARED},
    "qwen3next-fused-ssm-in": {
        "architecture": "qwen3next", **HYBRID, "experts": {**SHARED, "fused": True},
        "recurrent": {**DELTA_NET, "packing": "ssm_in"},
    },
    "lfm2": {"architecture": "lfm2", **SMALL, "layers": 5, "rope_base": 1e6},
    "lfm2-untied-long-taps": {
        "architecture": "lfm2", **SMALL, "layers": 4, "tied": False,
        "short_conv": {"interval": 2, "kernel": 5},
    },
    "lfm2moe": {
        "architecture": "lfm2moe", **SMALL, "layers": 5, "rope_base": 1e6, "experts": EXPERTS,
        "leading_dense": 2,
    },
    "lfm2moe-all-experts": {
        "architecture": "lfm2moe", **SMALL, "layers": 3, "tied": False, "leading_dense": 0,
        "experts": {**EXPERTS, "used": 12},
    },
    "granitehybrid": {"architecture": "granitehybrid", **SMALL, "layers": 4},
    "granitehybrid-groups": {
        "architecture": "granitehybrid", **SMALL, "layers": 3, "tied": False,
        "mamba": {"interval": 2, "state": 40, "heads": 4, "groups": 2, "kernel": 3},
    },
    "granitehybrid-experts": {
        "architecture": "granitehybrid", **SMALL, "layers": 3, "experts": SHARED,
    },
    "granitehybrid-experts-alone": {
        "architecture": "granitehybrid", **SMALL, "layers": 3, "experts": EXPERTS,
        "scales": {"embedding": 1.0, "residual": 1.0, "attention": 0.25, "logits": 3.0},
    },
    "falcon-h1": {
        "architecture": "falcon-h1", **SMALL, "layers": 3, "rope_base": 1e11,
        "mamba": {"inner": 192, "normed": False},
    },
    "falcon-h1-norms": {
        "architecture": "falcon-h1", **SMALL, "tied": False,
        "mamba": {"state": 40, "heads": 4, "groups": 2, "kernel": 3},
    },
    "mamba2": {"architecture": "mamba2", **SMALL, "layers": 3, "tied": False},
    "mamba2-groups": {
        "architecture": "mamba2", **SMALL, "mamba": {"state": 40, "heads": 4, "groups": 2},
    },
    "nemotron_h": {"architecture": "nemotron_h", **SMALL, "layers": 5, "tied": False},
    "nemotron_h-groups": {
        "architecture": "nemotron_h", **SMALL, "layers": 6,
        "mamba": {"interval": 3, "state": 40, "heads": 4, "groups": 2, "kernel": 3},
    },
    "nemotron_h_moe": {
        "architecture": "nemotron_h_moe", **SMALL, "layers": 5, "tied": False,
        "experts": {**SHARED, "used": 8},
    },
}  # fmt: skip

GEMMAS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {**SMALL, "architecture": "gemma"},
    "gemma2": {
        **SMALL, "architecture": "gemma2", "layers": 4,
        "gemma": {"window": 20, "period": 2, "softcap": 8.0},
    },
    "gemma3": GEMMA3,
    "gemma3-no-window": {**GEMMA3, "gemma": {"window": 0}},
    "gemma3-untied-softcap-linear": {
        **GEMMA3, "tied": False, "gemma": {**WINDOWS, "softcap": 5.0}, "rope_scaling": "linear",
        "rope_base": 1e6,
    },
    "gemma3n": {
        **SMALL, "architecture": "gemma3n",
        "gemma": {**WINDOWS, "period": 2, "per_layer_width": 256},
    },
    "gemma3n-shared-kv": {
        **SMALL, "architecture": "gemma3n", "layers": 6, "rope_base": 1e6,
        "gemma": {**WINDOWS, "softcap": 8.0, "per_layer_width": 64, "shared_kv_layers": 3},
    },
    "gemma4": GEMMA4,
    "gemma4-one-head-size": {**GEMMA4, "gemma": WINDOWS},
    "gemma4-values-from-keys": {**GEMMA4, "gemma": {**GEMMA4_WINDOWS, "values_from_keys": True}},
    "gemma4-experts": {**GEMMA4, "experts": EXPERTS},
    "gemma4-experts-fused-values-from-keys": {
        **GEMMA4, "experts": {**EXPERTS, "fused": True},
        "gemma": {**GEMMA4_WINDOWS, "values_from_keys": True},
    },
    "gemma4-shared-kv": {
        **GEMMA4, "layers": 7, "feed_forward": (256,) * 3 + (320,) * 4,
        "gemma": {**GEMMA4_WINDOWS, "shared_kv_layers": 4},
    },
    "gemma4-per-layer-embeddings": {
        **GEMMA4, "layers": 7,
        "gemma": {**GEMMA4_WINDOWS, "shared_kv_layers": 1, "per_layer_width": 64},
    },
    "gemma4-softcap": {**GEMMA4, "gemma": {**GEMMA4_WINDOWS, "softcap": 4.0}},
}  # fmt: skip

FAMILIES: Mapping[str, Mapping[str, Any]] = {**DENSE, **MIXTURES, **HYBRIDS, **GEMMAS}
"""Fields of ``harness.synth.sized_spec("tiny", ...)`` by name; the name starts with the
architecture."""

DEEP: Mapping[str, Mapping[str, Any]] = {
    "gemma3-27b": {
        **GEMMA3, "layers": 62, "hidden": 64, "feed_forward": 64,
        "gemma": {**WINDOWS, "period": 6},
    },
    "deepseek2-lite-experts": {
        "architecture": "deepseek2", "layers": 26, "hidden": 64, "heads": 4, "feed_forward": 64,
        "leading_dense": 1, "tied": False, "rope_scaling": "yarn", "rope_factor": 40.0,
        "rope_original_context": 32, "yarn_log_multiplier": 0.0707,
        "latent": {**LATENT, "query_rank": 0, "softmax": True},
        "experts": {**EXPERTS, "width": 32, "shared_width": 64},
    },
    "command-r-plus": {
        "architecture": "command-r", "layers": 64, "hidden": 64, "heads": 4, "kv_heads": 2,
        "head_dim": 16, "feed_forward": 64, "logit_scale": 0.5, "head_norms": True,
    },
    "baichuan-7b": {
        "architecture": "baichuan", "layers": 32, "hidden": 64, "heads": 4, "kv_heads": 4,
        "head_dim": 16, "feed_forward": 64, "tied": False,
    },
    "gemma3n-deep": {
        "architecture": "gemma3n", "layers": 22, "hidden": 64, "heads": 4, "kv_heads": 2,
        "head_dim": 16, "feed_forward": 512, "rope_base": 1e6,
        "gemma": {"window": 20, "period": 5, "per_layer_width": 256, "shared_kv_layers": 2},
    },
    "exaone4-32b": {
        "architecture": "exaone4", "layers": 64, "hidden": 64, "heads": 4, "kv_heads": 2,
        "head_dim": 16, "feed_forward": 64, "window": 20,
    },
}  # fmt: skip
"""Models whose depth changes a formula (but for Gemma and DeepSeek in llama.cpp alone), like
FAMILIES; for tests of logits only."""


EACH_KIND = (
    *("llama", "phi3", "gemma4", "mistral3", "qwen3moe", "gpt-oss-experts", "glm4moe-experts"),
    *("deepseek2", "qwen35", "qwen3next", "lfm2", "granitehybrid", "nemotron_h_moe"),
)
"""A model of each kind of layer. What tells others apart are formulas and names of keys, for which
``tests/model`` has every entry."""


def without_variants() -> tuple[str, ...]:
    """The first name of each architecture, with experts and without."""
    first: dict[tuple[object, bool], str] = {}
    for name, fields in FAMILIES.items():
        first.setdefault((fields["architecture"], bool(fields.get("experts"))), name)
    return tuple(first.values())
