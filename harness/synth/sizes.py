"""Named sizes of synthetic models: small ones for tests, and the shapes of published models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.synth.architectures import DENSE
from harness.synth.spec import AGREEMENTS, GROUPS, SynthSpec, refused, spec_of

_QWEN3 = {"head_dim": 128, "kv_heads": 8, "vocab": 151936, "context": 40960, "rope_base": 1e6}
_QWEN35 = {"head_dim": 256, "vocab": 248320, "context": 262144, "rope_base": 1e7}
_GEMMA4 = {"head_dim": 512, "vocab": 262144, "context": 262144, "rope_base": 1e6}
_GPT_OSS = {
    "kv_heads": 8, "head_dim": 64, "vocab": 201088, "context": 131072, "rope_base": 150000.0,
    "rope_scaling": "yarn", "rope_factor": 32.0, "rope_original_context": 4096, "window": 128,
    "feed_forward": 2880, "tied": False,
}  # fmt: skip
_LATENT = {"rank": 512, "unrotated": 128, "rotated": 64, "value": 128}
_YARN_40 = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_context": 4096}
_GEMMA3N = {"window": 512, "period": 5, "softcap": 30.0, "per_layer_width": 256}
_GEMMA4_WINDOWS = {"window": 1024, "head_dim": 256, "values_from_keys": True, "output_scale": True}


def _shape(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, **more}


SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    "small": _shape(4, 512, 8, kv_heads=4, feed_forward=1536, vocab=4096, context=4096),
}
"""The sizes every architecture has."""

_DENSE_SIZES: Mapping[str, Mapping[str, Any]] = {
    "0.6b": _shape(28, 1024, 16, feed_forward=3072, **_QWEN3),
    "1.7b": _shape(28, 2048, 16, feed_forward=6144, **_QWEN3),
    "8b": _shape(36, 4096, 32, feed_forward=12288, tied=False, **_QWEN3),
}
_64_EXPERTS = {"count": 64, "used": 8, "width": 256}

_LLAMA4_EXPERTS = {"used": 1, "width": 8192, "shared_width": 8192}

FAMILY_SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    **dict.fromkeys(DENSE, _DENSE_SIZES),
    "qwen3moe": {"1b": _shape(16, 1024, 16, **_QWEN3 | {"kv_heads": 4}, experts=_64_EXPERTS)},
    "qwen35moe": {
        "1b": _shape(12, 1024, 8, kv_heads=2, **_QWEN35)
        | {"experts": {**_64_EXPERTS, "shared_width": 256}}
        | {"recurrent": {"state": 128, "key_heads": 8, "value_heads": 16}},
        "35b-a3b": _shape(40, 2048, 16, kv_heads=2, tied=False, **_QWEN35)
        | {"experts": {"count": 256, "used": 8, "width": 512, "shared_width": 512}}
        | {"recurrent": {"state": 128, "key_heads": 16, "value_heads": 32}},
    },
    "gpt-oss": {
        size: _shape(layers, 2880, 64, **_GPT_OSS)
        | {"experts": {"count": experts, "used": 4, "width": 2880}}
        for size, layers, experts in (("20b", 24, 32), ("120b", 36, 128))
    },
    "glm4moe": {
        "106b-a12b": _shape(46, 4096, 96, kv_heads=8, head_dim=128, feed_forward=10944)
        | {"vocab": 151552, "context": 131072, "rope_base": 1e6, "tied": False}
        | {"experts": {"count": 128, "used": 8, "width": 1408, "shared_width": 1408}}
        | {"leading_dense": 1, "nextn_layers": 1}
    },
    "deepseek2": {
        "16b-a2.4b": _shape(27, 2048, 16, feed_forward=10944, vocab=102400, context=163840)
        | {"latent": {**_LATENT, "query_rank": 0, "softmax": True}, **_YARN_40}
        | {"yarn_log_multiplier": 0.0707, "leading_dense": 1, "tied": False}
        | {"experts": {"count": 64, "used": 6, "width": 1408, "shared_width": 2816}},
        "30b-a3b": _shape(47, 2048, 20, feed_forward=10240, vocab=154880, context=202752)
        | {"latent": {**_LATENT, "query_rank": 768, "unrotated": 192, "value": 256}}
        | {"rope_base": 1e6, "leading_dense": 1, "tied": False}
        | {"experts": {"count": 64, "used": 4, "width": 1536, "shared_width": 1536}},
        "671b-a37b": _shape(61, 7168, 128, feed_forward=18432, vocab=129280, context=163840)
        | {"latent": {**_LATENT, "query_rank": 1536, "groups": 8, "groups_used": 4}, **_YARN_40}
        | {"yarn_log_multiplier": 0.1, "leading_dense": 3, "tied": False}
        | {"experts": {"count": 256, "used": 8, "width": 2048, "shared_width": 2048}},
        "1t-a32b": _shape(61, 7168, 64, feed_forward=18432, vocab=163840, context=131072)
        | {"latent": {**_LATENT, "query_rank": 1536}, "rope_base": 5e4, **_YARN_40}
        | {"rope_factor": 32.0, "yarn_log_multiplier": 0.1, "leading_dense": 1, "tied": False}
        | {"experts": {"count": 384, "used": 8, "width": 2048, "shared_width": 2048}},
    },
    "llama4": {
        size: _shape(48, 5120, 40, kv_heads=8, head_dim=128, feed_forward=16384, vocab=202048)
        | {"context": context, "rope_base": 5e5, "rope_freqs": divided, "tied": False}
        | {"experts": {**_LLAMA4_EXPERTS, "count": count, "every": every}}
        for size, context, divided, count, every in (
            ("109b-a17b", 10485760, True, 16, 1),
            ("400b-a17b", 1048576, False, 128, 2),
        )
    },
    "kimi-linear": {
        "48b-a3b": _shape(27, 2304, 32, head_dim=72, feed_forward=9216, vocab=163840)
        | {"latent": {**_LATENT, "query_rank": 0}, "context": 1048576, "leading_dense": 1}
        | {"recurrent": {"state": 128, "key_heads": 32, "value_heads": 32}, "tied": False}
        | {"experts": {"count": 256, "used": 8, "width": 1024, "shared_width": 1024}}
    },
    "lfm2": {
        "1.2b": _shape(16, 2048, 32, kv_heads=8, feed_forward=8192, vocab=65536)
        | {"context": 128000, "rope_base": 1e6, "short_conv": {"interval": 3, "kernel": 3}}
    },
    "lfm2moe": {
        "8b-a1b": _shape(24, 2048, 32, kv_heads=8, feed_forward=7168, vocab=65536)
        | {"context": 128000, "rope_base": 1e6, "short_conv": {"interval": 4, "kernel": 3}}
        | {"leading_dense": 2, "experts": {"count": 32, "used": 4, "width": 1792}}
    },
    "exaone4": {
        "1.2b": _shape(30, 2048, 32, kv_heads=8, feed_forward=4096, vocab=102400)
        | {"context": 65536, "rope_base": 1e6},
        "32b": _shape(64, 5120, 40, kv_heads=8, head_dim=128, feed_forward=27392, vocab=102400)
        | {"context": 131072, "rope_base": 1e6, "window": 4096, "tied": False},
    },
    "ernie4_5": {
        "0.3b": _shape(18, 1024, 16, kv_heads=2, head_dim=128, feed_forward=3072, vocab=103424)
        | {"context": 131072, "rope_base": 5e5}
    },
    "seed_oss": {
        "36b": _shape(64, 5120, 80, kv_heads=8, head_dim=128, feed_forward=27648, vocab=155136)
        | {"context": 524288, "rope_base": 1e7, "tied": False}
    },
    "granitemoe": {
        "3b-a800m": _shape(32, 1536, 24, kv_heads=8, vocab=49155, context=131072)
        | {"experts": {"count": 40, "used": 8, "width": 512}, "rope_base": 1e7}
        | {"scales": {"embedding": 12.0, "residual": 0.22, "attention": 2.0**-6, "logits": 6.0}}
    },
    "minimax-m2": {
        "229b-a10b": _shape(62, 3072, 48, kv_heads=8, head_dim=128, vocab=200064, tied=False)
        | {"context": 196608, "rope_base": 5e6}
        | {"experts": {"count": 256, "used": 8, "width": 1536}}
    },
    "olmoe": {
        "7b-a1b": _shape(16, 2048, 16, kv_heads=16, head_dim=128, vocab=50304, tied=False)
        | {"context": 4096, "experts": {"count": 64, "used": 8, "width": 1024}}
    },
    "qwen2moe": {
        "14b-a2.7b": _shape(24, 2048, 16, kv_heads=16, head_dim=128, vocab=151936, tied=False)
        | {"context": 8192, "rope_base": 1e6}
        | {"experts": {"count": 60, "used": 4, "width": 1408, "shared_width": 5632}}
    },
    "qwen2vl": {
        "7b": _shape(28, 3584, 28, kv_heads=4, head_dim=128, feed_forward=18944, vocab=152064)
        | {"context": 128000, "rope_base": 1e6, "tied": False}
    },
    "qwen3vlmoe": {
        "30b-a3b": _shape(48, 2048, 32, **_QWEN3 | {"kv_heads": 4, "context": 262144})
        | {"experts": {"count": 128, "used": 8, "width": 768}, "rope_base": 5e6, "tied": False}
    },
    "ernie4_5-moe": {
        "21b-a3b": _shape(28, 2560, 20, kv_heads=4, head_dim=128, feed_forward=12288, vocab=103424)
        | {"context": 131072, "rope_base": 5e5, "leading_dense": 1}
        | {"experts": {"count": 64, "used": 6, "width": 1536, "shared_width": 3072}}
    },
    "bailingmoe2": {
        "16b-a1b": _shape(20, 2048, 16, kv_heads=4, head_dim=128, feed_forward=5120, vocab=157184)
        | {"context": 32768, "rope_base": 6e5, "leading_dense": 1, "tied": False}
        | {"experts": {"count": 256, "used": 8, "width": 512, "shared_width": 512}}
        | {"expert_groups": 8}
    },
    "exaone-moe": {
        "236b-a23b": _shape(48, 6144, 64, kv_heads=8, head_dim=128, feed_forward=18432)
        | {"vocab": 153600, "context": 262144, "rope_base": 1e6, "leading_dense": 1, "tied": False}
        | {"experts": {"count": 128, "used": 8, "width": 2048, "shared_width": 2048}, "window": 128}
    },
    "afmoe": {
        "26b-a3b": _shape(32, 2048, 32, kv_heads=4, head_dim=128, feed_forward=6144, vocab=200192)
        | {"context": 131072, "leading_dense": 2, "tied": False, "window": 2048}
        | {"experts": {"count": 128, "used": 8, "width": 1024, "shared_width": 1024}}
    },
    "hunyuan-dense": {
        "7b": _shape(32, 4096, 32, kv_heads=8, head_dim=128, feed_forward=14336, vocab=128167)
        | {"context": 262144}
    },
    "apertus": {
        "8b": _shape(32, 4096, 32, kv_heads=8, head_dim=128, feed_forward=21504, vocab=131072)
        | {"context": 65536, "rope_base": 1.2e7, "rope_freqs": True, "tied": False},
        "70b": _shape(80, 8192, 64, kv_heads=8, head_dim=128, feed_forward=43008, vocab=131072)
        | {"context": 65536, "rope_base": 1.2e7, "rope_freqs": True, "tied": False},
    },
    "starcoder2": {
        "7b": _shape(32, 4608, 36, kv_heads=4, head_dim=128, feed_forward=18432, vocab=49152)
        | {"context": 16384, "rope_base": 1e6}
    },
    "stablelm": {
        "1.6b": _shape(24, 2048, 32, kv_heads=32, head_dim=64, feed_forward=5632, vocab=100352)
        | {"context": 4096, "qkv_bias": True, "tied": False}
    },
    "phi2": {
        "2.7b": _shape(32, 2560, 32, kv_heads=32, head_dim=80, feed_forward=10240, vocab=51200)
        | {"context": 2048, "tied": False}
    },
    "exaone": {
        "7.8b": _shape(32, 4096, 32, kv_heads=8, head_dim=128, feed_forward=14336, vocab=102400)
        | {"context": 32768, "rope_base": 1e6, "rope_freqs": True, "tied": False}
    },
    "mamba2": {
        "7b": _shape(64, 4096, 1, kv_heads=1, vocab=32768, context=1 << 20, tied=False)
        | {"mamba": {"state": 128, "heads": 128, "groups": 8}}
    },
    "falcon-h1": {
        "0.5b": _shape(36, 1024, 8, kv_heads=2, head_dim=64, feed_forward=2048, vocab=32784)
        | {"context": 16384, "rope_base": 1e11}
        | {"mamba": {"state": 128, "heads": 24, "inner": 1536, "normed": False}},
        "7b": _shape(44, 3072, 12, kv_heads=2, head_dim=128, feed_forward=12288, vocab=130049)
        | {"context": 262144, "rope_base": 1e11, "tied": False}
        | {"mamba": {"state": 256, "heads": 24, "inner": 3072, "normed": False}},
    },
    "gemma2": {
        "2b": _shape(26, 2304, 8, kv_heads=4, head_dim=256, feed_forward=9216, vocab=256000)
        | {"context": 8192, "gemma": {"window": 4096, "period": 2, "softcap": 30.0}}
    },
    "gemma3n": {
        size: _shape(layers, 2048, 8, kv_heads=2, head_dim=256, feed_forward=width, vocab=262400)
        | {"context": 32768, "rope_base": 1e6}
        | {"gemma": {**_GEMMA3N, "shared_kv_layers": layers - 20}}
        for size, layers, width in (("e2b", 30, 8192), ("e4b", 35, 16384))
    },
    "gemma4": {
        "26b-a4b": _shape(30, 2816, 16, kv_heads=2, feed_forward=2112, **_GEMMA4)
        | {"experts": {"count": 128, "used": 8, "width": 704, "fused": True}}
        | {"gemma": {**_GEMMA4_WINDOWS, "kv_heads": 8}},
        "31b": _shape(60, 5376, 32, kv_heads=4, feed_forward=21504, **_GEMMA4)
        | {"gemma": {**_GEMMA4_WINDOWS, "kv_heads": 16}},
    },
}
"""Further sizes by architecture. Dense models have the sizes of Qwen 3; 35b-a3b is that of Qwen
3.6, 20b and 120b are those of gpt-oss, 26b-a4b and 31b those of Gemma 4, 106b-a12b is that of
GLM-4.5 Air, those of LFM 2 differ in the layers that attend; 1b has about a billion weights. The
others are the families' own published ones."""

_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "llama4": {"experts": {"shared_width": 64, "used": 1}},
    "granite": {"scales": {}},
    "granitemoe": {"scales": {}, "experts": {}},
    "phi3": {"fused_qkv": True},
    **{name: {"tied": False} for name in ("stablelm", "phi2", "gptneox", "nemotron", "baichuan")},
    "falcon": {"fused_qkv": True},
    "jais2": {"tied": False},
    "codeshell": {"fused_qkv": True, "tied": False},
    "orion": {"tied": False},
    "pangu-embedded": {"tied": False, "attention_output_bias": True},
    "xverse": {"tied": False},
    "qwen": {"kv_heads": 4, "fused_qkv": True, "tied": False},
    "chatglm": {"fused_qkv": True, "qkv_bias": True},
    "deepseek": {"experts": {"shared_width": 64}, "leading_dense": 1},
    "bailingmoe": {"experts": {"shared_width": 64}, "tied": False},
    "mamba2": {"mamba": {}},
    "gpt2": {"kv_heads": 4, "fused_qkv": True},
    "starcoder": {"kv_heads": 1, "fused_qkv": True},
    "mistral4": {"latent": {}, "experts": {"shared_width": 64}},
    "kimi-linear": {"latent": {"query_rank": 0}, "recurrent": {}, "layers": 4}
    | {"experts": {"shared_width": 64}, "leading_dense": 1, "tied": False},
    "hy_v3": {"experts": {"shared_width": 64}, "leading_dense": 1},
    "mellum": {"experts": {}, "tied": False},
    "smallthinker": {"experts": {}},
    "qwen3moe": {"experts": {}},
    "qwen3vlmoe": {"experts": {}},
    "minimax-m2": {"experts": {}},
    "qwen2moe": {"experts": {"shared_width": 64}},
    "olmoe": {"experts": {}, "kv_heads": 4},
    "gpt-oss": {"experts": {}, "window": 32},
    "glm4moe": {"experts": {"shared_width": 64}, "leading_dense": 1},
    "deepseek2": {"latent": {}, "layers": 3, "experts": {"shared_width": 64}, "leading_dense": 1},
    "dots1": {"experts": {"shared_width": 64}, "leading_dense": 1, "kv_heads": 4},
    "minicpm": {"scales": {}},
    "ernie4_5-moe": {"experts": {}, "leading_dense": 1},
    "bailingmoe2": {"experts": {"shared_width": 64}, "leading_dense": 1, "fused_qkv": True},
    "exaone-moe": {"experts": {"shared_width": 64}, "leading_dense": 1, "window": 32},
    "afmoe": {"experts": {"shared_width": 64}, "leading_dense": 1, "window": 32},
    "cohere2": {"window": 32},
    "qwen35": {"recurrent": {}, "layers": 4},
    "qwen35moe": {"experts": {"shared_width": 64}, "recurrent": {}, "layers": 4},
    "qwen3next": {"experts": {"shared_width": 64}, "recurrent": {}, "layers": 4},
    "lfm2": {"short_conv": {}, "layers": 3},
    "lfm2moe": {"short_conv": {}, "layers": 3, "experts": {}, "leading_dense": 1},
    "granitehybrid": {"scales": {}, "mamba": {}, "layers": 3},
    "falcon-h1": {"mamba": {}},
    "nemotron_h": {"mamba": {}, "layers": 4},
    "nemotron_h_moe": {"mamba": {}, "layers": 4, "experts": {"shared_width": 64}},
    "hunyuan-moe": {"experts": {"shared_width": 64}},
    "gemma": {"gemma": {"window": 0}},
    "gemma2": {"gemma": {"period": 2}},
    "gemma3": {"gemma": {"period": 2}},
    "gemma3n": {"gemma": {"period": 2, "per_layer_width": 256}},
    "gemma4": {"gemma": {"period": 2, "head_dim": 32, "kv_heads": 4, "output_scale": True}},
}
"""Fields an architecture needs, with values for sizes that do not set them."""


def size_names(architecture: str) -> tuple[str, ...]:
    """The sizes an architecture has."""
    return (*SIZES, *FAMILY_SIZES.get(architecture, {}))


def sized_spec(size: str, **overrides: Any) -> SynthSpec:
    """The specification of a named size with some fields replaced.

    A group may be given as a mapping of the fields to replace, or as None to remove it. Raises
    ConfigError."""
    architecture = overrides.get("architecture", "llama")
    own = FAMILY_SIZES.get(architecture, {})
    if size not in SIZES and size not in own:
        raise refused("size", size, f"one of {', '.join(size_names(architecture))}")
    values = {**_NEEDED.get(architecture, {}), **SIZES.get(size, {}), **own.get(size, {})}
    if overrides.get("mtp_agreement") is not None:
        values["nextn_layers"] = 1
    if any(overrides.get(name) is not None for name in AGREEMENTS):
        values["tied"] = False
    for name, value in overrides.items():
        if name in GROUPS and isinstance(value, Mapping):
            values[name] = {**(values.get(name) or {}), **value}
        else:
            values[name] = value
    return spec_of(values)
