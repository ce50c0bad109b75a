"""Reads the metadata keys of mixtures: of a softmax (DeepSeek, Ling), and of those whose experts
are chosen by a bias (ERNIE 4.5, Ling and Ring 2, K-EXAONE, Trinity)."""

from __future__ import annotations

import math
from dataclasses import replace

from reference.model.config import dense
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import (
    GATING,
    LEADING_DENSE,
    MAX_EXPERTS,
    MAX_GATING,
    SHARED_COUNT,
    SHARED_WIDTH,
    SIGMOID,
    SOFTMAX,
    read_experts,
    read_experts_of_chosen,
    read_routed_experts,
)
from reference.model.config.keys import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Keys
from reference.model.config.records import Experts, ModelConfig
from reference.model.config.rope import read_divided_rope, read_llama_rope

STEP = "interleave_moe_layer_step"


def read_ernie_moe(keys: Keys) -> ModelConfig:
    """ERNIE 4.5 with experts, which are weighted by a softmax and chosen by its sum with a bias if
    the file has one."""
    config = read_common(keys, read_llama_rope)
    gating = keys.integer(GATING, 0, MAX_GATING, 0) or SOFTMAX
    if gating != SOFTMAX:
        raise keys.unsupported(GATING, f"is {gating}", f"supported is {SOFTMAX}, a softmax")
    step = keys.integer(STEP, 1, MAX_LAYERS)
    if step != 1:
        raise keys.unsupported(STEP, f"is {step}", "supported is 1, experts in every layer")
    leading = keys.integer(LEADING_DENSE, 0, config.layers, 0)
    biased = f"blk.{leading}.exp_probs_b.bias" in keys.file.tensors
    experts = replace(
        read_experts(keys, config),
        choice_bias=biased,
        softmax=biased,
        leading_dense=leading,
        shared_width=keys.integer(SHARED_WIDTH, 0, MAX_WIDTH, 0),
        shared_gate=False,
    )
    return _with_experts(keys, config, experts)


def read_bailingmoe2(keys: Keys) -> ModelConfig:
    """Ling 2 and Ring 2: Qwen 3's heads, of which a part rotates; experts of groups."""
    config = read_common(keys)
    experts = _chosen_by_bias(keys, config)
    width = keys.integer(SHARED_WIDTH, 0, MAX_WIDTH, 0) or experts.widths[0]
    return _with_experts(
        keys,
        config,
        replace(experts, shared_width=width * keys.integer(SHARED_COUNT, 0, MAX_EXPERTS)),
    )


def read_exaone_moe(keys: Keys) -> ModelConfig:
    """K-EXAONE: heads rotate in layers with a window alone; one shared expert."""
    config = read_common(keys, read_divided_rope)
    config = dense.rotating_in_windows(keys, config, keys.integer(dense.WINDOW, 1, MAX_CONTEXT))
    experts = _chosen_by_bias(keys, config)
    width = keys.integer(SHARED_WIDTH, 0, MAX_WIDTH, 0) or experts.widths[0]
    return _with_experts(keys, config, replace(experts, shared_width=width))


def read_soft_routed(keys: Keys) -> ModelConfig:
    """DeepSeek's first mixture, and Ling's: a softmax over all experts, shared ones beside them."""
    config = read_common(keys, read_llama_rope)
    return _with_experts(keys, config, read_routed_experts(keys, config, SOFTMAX))


def read_hy_v3(keys: Keys) -> ModelConfig:
    """Hunyuan 3: norms of heads, halves rotate; a shared expert of a width of its own."""
    config = read_common(keys, read_divided_rope)
    experts = read_routed_experts(keys, config, SIGMOID)
    width = keys.integer(SHARED_WIDTH, 0, MAX_WIDTH, 0) or experts.widths[0]
    return _with_experts(keys, config, replace(experts, shared_width=width))


def read_mellum(keys: Keys) -> ModelConfig:
    """Mellum 2: Qwen 3's mixture, with windows in all but every n-th layer if the file has one."""
    config = dense.with_plain_windows(keys, read_common(keys))
    return replace(config, experts=read_experts(keys, config))


def read_smallthinker(keys: Keys) -> ModelConfig:
    """SmallThinker: the first of every four layers has no window and does not rotate, where the
    others have windows; experts of what a layer reads are weighted by a softmax or sigmoids."""
    config = read_common(keys)
    window = keys.integer(dense.WINDOW, 0, MAX_CONTEXT, 0)
    if window:
        config = dense.rotating_in_windows(keys, config, window, first=True)
    gating = keys.integer(GATING, 0, MAX_GATING, 0) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise keys.unsupported(GATING, f"is {gating}", "supported are 1, a softmax, 2, a sigmoid")
    return replace(config, experts=replace(read_experts(keys, config), sigmoid=gating == SIGMOID))


def read_afmoe(keys: Keys) -> ModelConfig:
    """Trinity: heads rotate in layers with a window alone; embeddings times the root of their
    width."""
    common = read_common(keys)
    config = dense.rotating_in_windows(keys, common, keys.integer(dense.WINDOW, 1, MAX_CONTEXT))
    config = replace(config, embedding_scale=math.sqrt(config.hidden))
    return _with_experts(keys, config, read_routed_experts(keys, config, SIGMOID))


def _chosen_by_bias(keys: Keys, config: ModelConfig) -> Experts:
    """Experts of a file that says how they are weighted."""
    keys.integer(GATING, 1, MAX_GATING)
    return read_routed_experts(keys, config, SIGMOID)


def _with_experts(keys: Keys, config: ModelConfig, experts: Experts) -> ModelConfig:
    """``config`` with experts, in all layers but the first ones if those have a dense block."""
    if experts.leading_dense:
        require_feed_forward(keys, config)
    return replace(config, experts=experts)


PATTERN = 2
"""Every second layer has full attention, the first has a window."""


def read_gpt_oss(keys: Keys) -> ModelConfig:
    """gpt-oss: windows in every second layer, one rotation for all layers."""
    config = read_common(keys)
    dense.refuse_sliding_base(keys, config.ropes[0])
    dense.refuse_other_sizes(keys, config)
    window = keys.integer(dense.WINDOW, 1, MAX_CONTEXT)
    sliding, rope = dense.window_pattern(keys, config, PATTERN), config.ropes[0]
    return replace(
        dense.with_window(config, window, sliding, rope, rope),
        experts=replace(read_experts_of_chosen(keys, config), biases=True),
        sinks=True,
    )
