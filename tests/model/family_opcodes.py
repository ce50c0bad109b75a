"""How many nodes of each opcode the graph of a small file of every family has."""

from __future__ import annotations

from tests.model.family_parts import LAYERS

ATTENTION = {
    **dict.fromkeys(("rms_norm_fused_rope_kv_write", "flash_attn_batched"), LAYERS),
    "barrier": LAYERS + 1,
}
PROJECTED = {**ATTENTION, "rms_norm_fused_qkv": LAYERS, "matmul": LAYERS}
DENSE = {"rms_norm_fused_mlp_gate_up": LAYERS, "swiglu": LAYERS}
EXPERTS = dict.fromkeys(
    ("residual_rms_norm", "moe_gate_topk", "moe_gate_up", "moe_swiglu", "moe_down_acc"), LAYERS
)
STEP = dict.fromkeys(
    (
        *("load_request_state", "embed", "select_rows", "rms_norm"),
        *("lm_head", "sample", "stream_out", "store_request_state"),
    ),
    1,
)
HALF = LAYERS // 2
MIXERS = {
    "rms_norm_fused_rope_kv_write": HALF,
    "flash_attn_batched": HALF,
    "barrier": HALF + 1,
    "ssm_conv1d": HALF,
    "ssm_delta_net": HALF,
    "ssm_gated_norm": HALF,
    "rms_norm": LAYERS + 1,
    "matmul": 10 * HALF,
}

DENSE_DECODER = {**STEP, **PROJECTED, **DENSE, "matmul": 2 * LAYERS, "add": 2 * LAYERS}
COHERE = {
    **DENSE_DECODER,
    "matmul": 2 * LAYERS + 2 * (LAYERS + 1),
    "scale": LAYERS + 2,
    "add": 3 * LAYERS + 1,
}
"""A layer norm: two products with ones, a factor, a sum."""
BIASED = {
    **DENSE_DECODER,
    "rms_norm_fused_qkv": 0,
    "rms_norm": LAYERS + 1,
    "bias_add": 3 * LAYERS,
    "matmul": 5 * LAYERS,
}
LAYER_NORMED = {
    **STEP,
    **ATTENTION,
    "swiglu": LAYERS,
    "rms_norm": 2 * LAYERS + 1,
    "add": 4 * LAYERS + 1,
}
BIASES_EVERYWHERE = {
    **LAYER_NORMED,
    "matmul": 10 * LAYERS + 2,
    "scale": 3 * LAYERS + 1,
    "bias_add": 9 * LAYERS + 1,
}
"""Norms of four nodes and a bias; ones for what has no gate, of a factor and a bias."""
WHOLE_NORMS = {
    **STEP,
    **PROJECTED,
    **EXPERTS,
    "rms_norm_fused_qkv": 0,
    "rms_norm": 3 * LAYERS + 1,
    "matmul": 4 * LAYERS,
}
LATE_NORMS = {
    "rms_norm_fused_rope_kv_write": 0,
    "rope": 2 * LAYERS,
    "rms_norm": 2 * LAYERS + 1,
    "kv_write_batched": LAYERS,
}
NEMOTRON = {
    **STEP,
    **dict.fromkeys(("rms_norm_fused_qkv", "rms_norm_fused_rope_kv_write"), 1),
    **dict.fromkeys(("flash_attn_batched", "ssm_conv1d", "ssm_scan"), 1),
    "barrier": 2,
    "rms_norm": 2 + HALF + 1,
    "add": LAYERS,
}
"""One layer that attends, one Mamba-2, HALF feed forwards."""
ROUTED = {
    **STEP,
    **PROJECTED,
    **{name: count - 1 for name, count in EXPERTS.items()},
    "shared_expert": LAYERS - 1,
    "rms_norm_fused_mlp_gate_up": 1,
    "swiglu": 1,
    "add": 2,
    "matmul": LAYERS + 1,
}
"""Experts beside a shared one behind a dense layer."""
SQUARED = {
    **DENSE_DECODER,
    "rms_norm_fused_mlp_gate_up": 0,
    "rms_norm": LAYERS + 1,
    "matmul": 3 * LAYERS,
}
"""A feed forward without gates."""
COMPOSITION: dict[str, dict[str, int]] = {
    **dict.fromkeys(("llama", "ernie4_5", "baichuan", "exaone"), DENSE_DECODER),
    "arcee": SQUARED,
    "apertus": {**SQUARED, "swiglu": 0, "xielu": LAYERS},
    "chatglm": {
        **DENSE_DECODER,
        "rms_norm_fused_qkv": 0,
        "rms_norm": LAYERS + 1,
        "bias_add": LAYERS,
        "matmul": 3 * LAYERS,
    },
    "deepseek": ROUTED,
    "bailingmoe": {**STEP, **PROJECTED, **EXPERTS, "shared_expert": LAYERS},
    "llama4": {
        **STEP,
        **PROJECTED,
        **dict.fromkeys((*EXPERTS, "shared_expert", "scale", "bias_add"), HALF),
        "rms_norm_fused_mlp_gate_up": HALF,
        "swiglu": LAYERS,
        "matmul": LAYERS + 2 * HALF,
        "add": LAYERS,
    },
    "mistral3": DENSE_DECODER,
    "smollm3": DENSE_DECODER,
    "exaone4": {
        **DENSE_DECODER,
        "rms_norm_fused_qkv": 0,
        "rms_norm_fused_mlp_gate_up": 0,
        "rms_norm": 2 * LAYERS + 1,
        "matmul": 7 * LAYERS,
    },
    "granitemoe": {
        **STEP,
        **PROJECTED,
        **EXPERTS,
        "residual_rms_norm": 0,
        "shared_expert": LAYERS,
        "rms_norm": LAYERS + 1,
        "add": 2 * LAYERS,
        "scale": 2 * LAYERS + 2,
    },
    "granite": {**DENSE_DECODER, "scale": 2 * LAYERS + 2},
    "glm4": {**DENSE_DECODER, "rms_norm": 2 * LAYERS + 1},
    "phi3": DENSE_DECODER,
    "olmo2": {
        **DENSE_DECODER,
        "rms_norm_fused_qkv": 0,
        "rms_norm_fused_mlp_gate_up": 0,
        "rms_norm": 4 * LAYERS + 1,
        "matmul": 7 * LAYERS,
    },
    **dict.fromkeys(("minimax-m2", "olmoe"), WHOLE_NORMS),
    **dict.fromkeys(("qwen2", "qwen2vl", "seed_oss"), BIASED),
    **dict.fromkeys(("qwen3", "qwen3vl"), DENSE_DECODER),
    "qwen3moe": {**STEP, **PROJECTED, **EXPERTS},
    "qwen3vlmoe": {**STEP, **PROJECTED, **EXPERTS},
    "qwen2moe": {
        **STEP,
        **PROJECTED,
        **EXPERTS,
        "shared_expert": LAYERS,
        "rms_norm_fused_qkv": 0,
        "rms_norm": LAYERS + 1,
        "bias_add": 3 * LAYERS,
        "matmul": 4 * LAYERS,
    },
    **dict.fromkeys(("command-r", "cohere2"), COHERE),
    **dict.fromkeys(("starcoder2", "gptneox"), BIASES_EVERYWHERE),
    "stablelm": {
        **LAYER_NORMED,
        "matmul": 11 * LAYERS + 2,
        "scale": 2 * LAYERS + 1,
        "bias_add": 2 * LAYERS + 1,
    },
    "nemotron": {
        **LAYER_NORMED,
        "matmul": 10 * LAYERS + 2,
        "scale": 2 * LAYERS + 1,
        "bias_add": 2 * LAYERS + 1,
    },
    "olmo": {**LAYER_NORMED, "matmul": 11 * LAYERS + 2, "scale": 2 * LAYERS + 1},
    "falcon": {
        **LAYER_NORMED,
        "matmul": 6 * LAYERS + 2,
        "scale": 2 * LAYERS + 1,
        "add": 3 * LAYERS + 1,
        "rms_norm": LAYERS + 1,
        "bias_add": 2 * LAYERS + 1,
    },
    "phi2": {
        **LAYER_NORMED,
        "matmul": 8 * LAYERS + 2,
        "scale": 2 * LAYERS + 1,
        "add": 3 * LAYERS + 1,
        "rms_norm": LAYERS + 1,
        "bias_add": 8 * LAYERS + 2,
    },
    "glm4moe": {
        **STEP,
        **PROJECTED,
        **{name: count - 1 for name, count in EXPERTS.items()},
        "shared_expert": LAYERS - 1,
        "rms_norm_fused_qkv": 0,
        "rms_norm_fused_mlp_gate_up": 1,
        "swiglu": 1,
        "add": 2,
        "rms_norm": LAYERS + 1,
        "bias_add": 3 * LAYERS,
        "matmul": 4 * LAYERS + 1,
    },
    "deepseek2": {
        **STEP,
        **{name: count - 1 for name, count in EXPERTS.items()},
        "shared_expert": LAYERS - 1,
        "rms_norm_fused_mlp_gate_up": 1,
        "swiglu": 1,
        "add": 2,
        "rms_norm": 3 * LAYERS + 1,
        "matmul": 6 * LAYERS + 1,
        "rope": 2 * LAYERS,
        "scale": 2 * LAYERS,
        "kv_write_batched": LAYERS,
        "flash_attn_batched": LAYERS,
        "head_product": 2 * LAYERS,
        "barrier": LAYERS + 1,
    },
    "gpt-oss": {
        **STEP,
        **PROJECTED,
        **EXPERTS,
        "rms_norm_fused_qkv": 0,
        "rms_norm": LAYERS + 1,
        "bias_add": 4 * LAYERS,
        "matmul": 4 * LAYERS,
    },
    "qwen35": {
        **STEP,
        **MIXERS,
        "rms_norm_fused_mlp_gate_up": LAYERS,
        "swiglu": LAYERS + HALF,
        "matmul": 10 * HALF + LAYERS,
        "add": 2 * LAYERS,
    },
    "qwen35moe": {**STEP, **MIXERS, **EXPERTS, "shared_expert": LAYERS, "swiglu": HALF},
    "qwen3next": {**STEP, **MIXERS, **EXPERTS, "shared_expert": LAYERS, "swiglu": HALF},
    "lfm2": {
        **DENSE_DECODER,
        **{name: count // 2 for name, count in ATTENTION.items()},
        "rms_norm_fused_qkv": HALF,
        "barrier": HALF + 1,
        "ssm_conv1d": HALF,
        "rms_norm": HALF + 1,
        "matmul": 2 * LAYERS + HALF,
    },
    "lfm2moe": {
        **STEP,
        **{name: count // 2 for name, count in ATTENTION.items()},
        **{name: count - 1 for name, count in EXPERTS.items()},
        "rms_norm_fused_qkv": HALF,
        "barrier": HALF + 1,
        "ssm_conv1d": HALF,
        "rms_norm": HALF + 1,
        "rms_norm_fused_mlp_gate_up": 1,
        "swiglu": 1,
        "add": 2,
        "matmul": 2 * HALF + HALF + 1,
    },
    "granitehybrid": {
        **DENSE_DECODER,
        **{name: count // 2 for name, count in ATTENTION.items()},
        "rms_norm_fused_qkv": HALF,
        "barrier": HALF + 1,
        "ssm_conv1d": HALF,
        "ssm_scan": HALF,
        "swiglu": LAYERS + HALF,
        "rms_norm": LAYERS + 1,
        "matmul": 2 * LAYERS + HALF,
        "scale": 2 * LAYERS + 2,
    },
    "falcon-h1": {
        **DENSE_DECODER,
        "rms_norm_fused_qkv": 0,
        **dict.fromkeys(("ssm_conv1d", "ssm_scan"), LAYERS),
        "swiglu": 2 * LAYERS,
        "rms_norm": 2 * LAYERS + 1,
        "matmul": 7 * LAYERS,
        "add": 3 * LAYERS,
    },
    "mamba2": {
        **STEP,
        **dict.fromkeys(("ssm_conv1d", "ssm_scan", "swiglu", "add"), LAYERS),
        "rms_norm": 2 * LAYERS + 1,
        "matmul": 2 * LAYERS,
        "barrier": 1,
    },
    "nemotron_h": {**NEMOTRON, "swiglu": 1 + HALF, "matmul": 2 + 1 + 2 * HALF},
    "nemotron_h_moe": {
        **NEMOTRON,
        **{name: HALF for name in EXPERTS if name != "residual_rms_norm"},
        "swiglu": 1 + HALF,
        "matmul": 2 + 1 + 2 * HALF,
    },
    **dict.fromkeys(("dots1", "exaone-moe", "ernie4_5-moe"), ROUTED),
    "bailingmoe2": {
        **ROUTED,
        "rms_norm_fused_qkv": 0,
        "rms_norm": LAYERS + 1,
        "matmul": 2 * LAYERS + 1,
    },
    "afmoe": {
        **ROUTED,
        "rms_norm_fused_qkv": 0,
        "residual_rms_norm": 0,
        "rms_norm": 3 * LAYERS + (LAYERS - 1) + 1,
        "swiglu": LAYERS + 1,
        "add": 2 * LAYERS,
        "scale": 1,
        "matmul": 5 * LAYERS + 1,
    },
    "internlm2": DENSE_DECODER,
    "minicpm": {**DENSE_DECODER, "scale": 2 * LAYERS + 2},
    "hunyuan-dense": {**DENSE_DECODER, **LATE_NORMS},
    "hunyuan-moe": {
        **STEP,
        **PROJECTED,
        **EXPERTS,
        **LATE_NORMS,
        "shared_expert": LAYERS,
        "matmul": LAYERS,
    },
    "gemma": {**DENSE_DECODER, "scale": 1},
    "gemma2": {**DENSE_DECODER, "rms_norm": 2 * LAYERS + 1, "scale": 1, "soft_cap": 1},
    "gemma3": {**DENSE_DECODER, "rms_norm": 2 * LAYERS + 1, "scale": 1},
    "gemma4": {
        **DENSE_DECODER,
        "rms_norm_fused_qkv": HALF,
        "matmul": 2 * LAYERS + 2 * HALF,
        # After each block, of the values, before the projections of layers without attn_v.
        "rms_norm": 2 * LAYERS + LAYERS + HALF + 1,
        "scale": 1,
        "scale_columns": HALF,
        "soft_cap": 1,
    },
}
