"""The metadata keys of a synthetic model, except its tokenizer's."""

from __future__ import annotations

import math
from typing import Any

from harness.synth.architectures import (
    COHERES,
    COUNTED,
    FALCON_H1,
    GEMMA3N,
    KIMI_LINEAR,
    LAYER_NORMED,
    LEADING,
    LLAMA4,
    MAMBA2,
    NEMOTRONS,
    ROUTED,
    SOFT_ROUTED,
)
from harness.synth.groups import ExpertSpec, Gemma, LatentSpec, MambaSpec, Recurrent
from harness.synth.spec import SynthSpec
from reference.model.config.vision import SEEING

RMS_EPSILON = 1e-6
LONG_ROPE_ATTENTION = 1.19
"""The factor of sine and cosine in files with divisors for long contexts."""
SOFTMAX_GATING, SIGMOID_GATING = 1, 2
"""The numbers of routers whose logits go through a softmax, and through a sigmoid."""
SCORE_CAP = 2.0
"""The bound of attention's scores in gemma2, which those of random weights come near."""
WEIGHT_SCALE = 2.5
"""The factor of the experts' weights in glm4moe, and in deepseek2 with a sigmoid."""
DEVIATIONS, SPARSE_LAYERS = 1.6448533535003662, 10
"""How far above their mean gates of gemma3n are kept, one of twenty, and in how many layers."""
DEEPSTACK = 3
"""How many layers of qwen3vl add parts of an image."""
ORIGINAL = "rope.scaling.original_context_length"
GROWTH_LENGTH = {LLAMA4: "attention.temperature_length"}
"""The key of the positions after which queries grow, where it is not ORIGINAL."""
XIELU_FIRST = {"alpha_p": 0.2, "alpha_n": 0.4, "beta": 0.5, "eps": -0.25}
"""The numbers of xIELU of the first layer; others have more by XIELU_STEP."""
XIELU_STEP = 0.0625
ROPE_SECTIONS = (11, 11, 10, 0)
"""Rotary pairs for time, height and width; text uses the same angle for all three."""


def architecture_keys(spec: SynthSpec) -> dict[str, Any]:
    """The keys of the model, without the architecture's name as prefix."""
    widths = spec.feed_forward
    keys: dict[str, Any] = {
        "block_count": spec.blocks,
        "context_length": spec.context,
        "embedding_length": spec.hidden,
        "feed_forward_length": list(widths) if isinstance(widths, tuple) else widths,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": RMS_EPSILON,
        "rope.dimension_count": spec.rope_dims,
        "rope.freq_base": spec.rope_base,
    }
    if spec.architecture == "qwen":  # the width of gates and ups together
        keys["feed_forward_length"] = [2 * width for width in spec.feed_forward_widths]
    if spec.architecture in NEMOTRONS:
        feeding = [spec.is_feed_forward_only(block) for block in range(spec.blocks)]
        width = spec.experts.width if spec.experts else spec.feed_forward
        keys["feed_forward_length"] = [width if feeds else 0 for feeds in feeding]
        keys["attention.layer_norm_epsilon"] = RMS_EPSILON
    if spec.architecture in (*COHERES, *LAYER_NORMED, "olmo"):
        keys["attention.layer_norm_epsilon"] = keys.pop("attention.layer_norm_rms_epsilon")
    if spec.architecture in COHERES:
        keys["logit_scale"] = spec.logit_scale
    if spec.architecture in ("stablelm", "gptneox"):
        keys["use_parallel_residual"] = spec.parallel
    keys |= _rope_keys(spec)
    if spec.window:
        keys["attention.sliding_window"] = spec.window
    if (scales := spec.scales) is not None:
        keys["embedding_scale"] = scales.embedding
        keys["residual_scale"] = scales.residual
        if spec.architecture != "minicpm":
            keys["attention.scale"] = scales.attention
        keys["logit_scale"] = scales.logits
    if spec.architecture == MAMBA2:
        keys |= dict.fromkeys(("feed_forward_length", "attention.head_count"), 0)
        unread = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
        keys = {key: keys[key] for key in keys if key not in unread and not key.startswith("rope")}
    if spec.nextn_layers:
        keys["nextn_predict_layers"] = spec.nextn_layers
    if spec.experts is not None:
        keys |= _expert_keys(spec, spec.experts)
    if spec.recurrent is not None:
        keys |= _recurrent_keys(spec, spec.recurrent)
    if spec.short_conv is not None:
        keys["attention.head_count_kv"] = _kv_heads(spec)
        keys["shortconv.l_cache"] = spec.short_conv.kernel
    if spec.mamba is not None:
        keys |= _mamba_keys(spec, spec.mamba)
    if spec.latent is not None:
        keys |= _latent_keys(spec, spec.latent)
    if spec.gemma is not None:
        keys |= _gemma_keys(spec, spec.gemma)
    if spec.architecture in SEEING:
        keys |= _image_keys(spec)
    return keys


def _rope_keys(spec: SynthSpec) -> dict[str, Any]:
    """How angles, and queries with their position, grow."""
    keys: dict[str, Any] = {}
    if spec.rope_scaling != "none":
        keys["rope.scaling.type"] = spec.rope_scaling
        keys["rope.scaling.factor"] = spec.rope_factor
        keys["rope.scaling.original_context_length"] = spec.rope_original_context
    if spec.query_growth:
        keys[GROWTH_LENGTH.get(spec.architecture, ORIGINAL)] = spec.rope_original_context
        keys["attention.temperature_scale"] = spec.query_growth
    if spec.yarn_log_multiplier:
        keys["rope.scaling.yarn_log_multiplier"] = spec.yarn_log_multiplier
    if spec.long_rope:
        keys["rope.scaling.original_context_length"] = spec.rope_original_context
        keys["rope.scaling.attn_factor"] = LONG_ROPE_ATTENTION
    return keys


def _image_keys(spec: SynthSpec) -> dict[str, Any]:
    """Sections of equal parts, which are all pairs."""
    third = spec.rope_dims // 6
    keys: dict[str, Any] = {
        "rope.dimension_sections": [spec.rope_dims // 2 - 2 * third, third, third, 0]
    }
    return keys if spec.architecture == "qwen2vl" else keys | {"n_deepstack_layers": DEEPSTACK}


def shared_keys(spec: SynthSpec) -> dict[str, Any]:
    """The keys that have no architecture's name before them."""
    if spec.architecture != "apertus":
        return {}
    layers = range(spec.blocks)
    return {
        f"xielu.{name}": [first + XIELU_STEP * layer for layer in layers]
        for name, first in XIELU_FIRST.items()
    }


def _expert_keys(spec: SynthSpec, experts: ExpertSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {"expert_count": experts.count, "expert_used_count": experts.used}
    # Experts of these architectures have the width that the key of dense layers gives; some have
    # both keys.
    like_dense = spec.architecture in ("llama", "olmoe", "granitemoe", "granitehybrid")
    if like_dense or spec.architecture in ("minimax-m2", "hunyuan-moe"):
        keys["feed_forward_length"] = experts.width
    if not like_dense:
        keys["expert_feed_forward_length"] = experts.width
    if spec.architecture == LLAMA4:
        keys["interleave_moe_layer_step"] = experts.every
    if spec.architecture in LEADING:
        keys["leading_dense_block_count"] = spec.leading_dense
    if spec.architecture == "ernie4_5-moe":
        keys["interleave_moe_layer_step"] = 1
    elif spec.architecture in (*LEADING, "minimax-m2") and spec.architecture not in SOFT_ROUTED:
        keys["expert_gating_func"] = SIGMOID_GATING
    if spec.latent is not None:
        softmax = spec.latent.softmax
        keys["expert_gating_func"] = SOFTMAX_GATING if softmax else SIGMOID_GATING
        if spec.latent.groups > 1:
            keys["expert_group_count"] = spec.latent.groups
            keys["expert_group_used_count"] = spec.latent.groups_used
    if spec.architecture in COUNTED:
        keys["expert_shared_count"] = experts.shared_width // experts.width
    if experts.shared_width and spec.architecture not in (*COUNTED, LLAMA4):
        keys["expert_shared_feed_forward_length"] = experts.shared_width
    scaled = spec.latent is not None and not spec.latent.softmax
    if spec.expert_groups > 1:
        keys["expert_group_count"] = spec.expert_groups
        keys["expert_group_used_count"] = spec.expert_groups // 2
    if spec.architecture == "exaone-moe":
        keys["expert_shared_feed_forward_length"] = experts.shared_width
    if spec.architecture == "bailingmoe":
        keys["expert_weights_norm"] = True
    if spec.architecture == "smallthinker":
        keys["expert_gating_func"] = SIGMOID_GATING
        keys["feed_forward_length"] = experts.width
    if scaled or spec.architecture in ("glm4moe", "dots1", "nemotron_h_moe", "hy_v3", *ROUTED):
        keys["expert_weights_norm"] = True
        keys["expert_weights_scale"] = WEIGHT_SCALE
    if spec.architecture == KIMI_LINEAR:
        del keys["expert_weights_norm"]
    return keys


def _recurrent_keys(spec: SynthSpec, recurrent: Recurrent) -> dict[str, Any]:
    if spec.architecture == KIMI_LINEAR:
        return {"ssm.conv_kernel": recurrent.kernel, "kda.head_dim": recurrent.state}
    keys: dict[str, Any] = {
        "ssm.conv_kernel": recurrent.kernel,
        "ssm.inner_size": recurrent.inner,
        "ssm.state_size": recurrent.state,
        "ssm.time_step_rank": recurrent.value_heads,
        "ssm.group_count": recurrent.key_heads,
    }
    if recurrent.listed:
        layers = [spec.is_recurrent(block) for block in range(spec.blocks)]
        keys["attention.recurrent_layers"] = layers
    else:
        keys["full_attention_interval"] = recurrent.interval
    if spec.architecture != "qwen3next":
        keys["rope.dimension_sections"] = list(ROPE_SECTIONS)
    return keys


def _mamba_keys(spec: SynthSpec, mamba: MambaSpec) -> dict[str, Any]:
    alike = spec.architecture in (FALCON_H1, MAMBA2)
    unlike = {"attention.head_count_kv": _kv_heads(spec), "rope.scaling.finetuned": False}
    return ({} if alike else unlike) | {
        "ssm.conv_kernel": mamba.kernel,
        "ssm.inner_size": mamba.inner or 2 * spec.hidden,
        "ssm.state_size": mamba.state,
        "ssm.time_step_rank": mamba.heads,
        "ssm.group_count": mamba.groups,
    }


def _latent_keys(spec: SynthSpec, latent: LatentSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent.rank + latent.rotated,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.unrotated + latent.rotated,
        "attention.value_length_mla": latent.value,
        "attention.kv_lora_rank": latent.rank,
        "leading_dense_block_count": spec.leading_dense if spec.experts else spec.layers,
    }
    if spec.architecture == KIMI_LINEAR:
        # Published files have the head size of a configuration that nothing else uses.
        keys["attention.value_length"] = spec.head_dim
        keys["attention.head_count_kv"] = [int(heads > 0) for heads in _kv_heads(spec)]
    if latent.query_rank:
        keys["attention.q_lora_rank"] = latent.query_rank
    if spec.experts is None:
        keys |= {"expert_feed_forward_length": spec.hidden, "expert_shared_count": 0}
    return keys


def _kv_heads(spec: SynthSpec) -> list[int]:
    """Heads for keys and values of every block, none in those that do not attend."""
    blocks = range(spec.blocks)
    without = (spec.is_recurrent(block) or spec.is_feed_forward_only(block) for block in blocks)
    return [0 if alone else spec.kv_heads for alone in without]


def _gemma_keys(spec: SynthSpec, gemma: Gemma) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if spec.architecture != "gemma":
        keys["attention.sliding_window"] = gemma.window
    if gemma.softcap is not None:
        keys["final_logit_softcapping"] = gemma.softcap
    if gemma.window:
        keys["rope.freq_base_swa"] = gemma.rope_base
    if spec.architecture == "gemma":
        return keys
    if spec.architecture == "gemma2":
        keys["attn_logit_softcapping"] = SCORE_CAP
    if spec.architecture == GEMMA3N:
        keys["attention.shared_kv_layers"] = gemma.shared_kv_layers
        keys["embedding_length_per_layer_input"] = gemma.per_layer_width
        pattern = [spec.is_windowed(layer) for layer in range(spec.layers)]
        keys["attention.sliding_window_pattern"] = pattern
        sparse = [DEVIATIONS if n < SPARSE_LAYERS else -math.inf for n in range(spec.layers)]
        return keys | {"activation_sparsity_scale": sparse, "altup.num_inputs": 4}
    if spec.architecture != "gemma4":
        return keys | {"attention.sliding_window_pattern": gemma.period}
    layers = range(spec.layers)
    windowed = next((layer for layer in layers if spec.is_windowed(layer)), 0)
    swa = spec.head_dim_of(windowed)
    return keys | {
        "attention.sliding_window_pattern": [spec.is_windowed(layer) for layer in layers],
        "attention.head_count_kv": [spec.kv_heads_of(layer) for layer in layers],
        "attention.key_length_swa": swa,
        "attention.value_length_swa": swa,
        "rope.dimension_count_swa": swa,
        "attention.shared_kv_layers": gemma.shared_kv_layers,
        "embedding_length_per_layer_input": gemma.per_layer_width,
    }
