"""Reads the metadata keys of models that mix recurrent layers and attention layers."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import (
    EPSILON,
    LAYER_NORM_EPSILON,
    read_common,
    require_feed_forward,
)
from reference.model.config.dense import with_granite_experts
from reference.model.config.experts import (
    LEADING_DENSE,
    SHARED_WIDTH,
    SIGMOID,
    WEIGHT_SCALE,
    read_chosen_by_bias,
    read_plain_weights,
)
from reference.model.config.keys import MAX_LAYERS, MAX_WIDTH, Keys
from reference.model.config.records import DeltaNet, Mamba, ModelConfig, ShortConv
from reference.model.config.rope import read_llama_rope, read_no_rope

DEFAULT_INTERVAL = 4
MAX_TAPS = 1 << 10


def read_delta_net(keys: Keys, config: ModelConfig) -> DeltaNet:
    """Read the delta net's sizes, check that they are consistent, and find the recurrent layers."""
    state_size = keys.integer("ssm.state_size", 1, MAX_WIDTH)
    value_heads = keys.integer("ssm.time_step_rank", 1, MAX_WIDTH)
    key_heads = keys.integer("ssm.group_count", 1, MAX_WIDTH)
    if value_heads % key_heads:
        raise keys.error(
            "ssm.group_count",
            f"is {key_heads}, must divide {keys.key('ssm.time_step_rank')} ({value_heads})",
        )
    inner_size = keys.integer("ssm.inner_size", 1, MAX_WIDTH)
    if inner_size != state_size * value_heads:
        raise keys.error(
            "ssm.inner_size",
            f"is {inner_size}, must be {state_size * value_heads}: {keys.key('ssm.state_size')} "
            f"({state_size}) times {keys.key('ssm.time_step_rank')} ({value_heads})",
        )
    return DeltaNet(
        taps=read_taps(keys),
        state_size=state_size,
        key_heads=key_heads,
        value_heads=value_heads,
        layers=_recurrent_layers(keys, config),
    )


def read_taps(keys: Keys) -> int:
    """Tokens of a convolution, the current one included."""
    return keys.integer("ssm.conv_kernel", 2, MAX_TAPS)


def _recurrent_layers(keys: Keys, config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer is recurrent: from ``attention.recurrent_layers``, else by a fixed
    interval."""
    if keys.has("attention.recurrent_layers"):
        return keys.flags("attention.recurrent_layers", config.layers, config.blocks)
    interval = keys.integer("full_attention_interval", 1, MAX_LAYERS, DEFAULT_INTERVAL)
    return tuple((layer + 1) % interval != 0 for layer in range(config.layers))


def read_lfm2(keys: Keys) -> ModelConfig:
    """LFM 2: gated short convolutions in the layers without heads for keys and values."""
    config = require_feed_forward(keys, read_common(keys, min_kv_heads=0))
    layers = tuple(heads == 0 for heads in config.kv_heads)
    taps = keys.integer("shortconv.l_cache", 2, MAX_TAPS)
    return replace(config, short_conv=ShortConv(taps, layers))


def read_lfm2moe(keys: Keys) -> ModelConfig:
    """LFM 2 with experts in all but the first layers."""
    config = read_lfm2(keys)
    return replace(config, experts=read_chosen_by_bias(keys, config))


def read_granite_hybrid(keys: Keys) -> ModelConfig:
    """Granite 4: Mamba-2 in the layers without heads for keys and values, Granite's factors, and
    experts with or without a shared one."""
    common = read_common(keys, read_llama_rope, min_kv_heads=0)
    config = with_granite_experts(keys, common)
    return replace(config, mamba=_read_mamba(keys, config))


def read_mamba2(keys: Keys) -> ModelConfig:
    """Mamba-2 in every layer, and nothing else."""
    config = read_common(keys, attends=False)
    return replace(config, mamba=_read_mamba(keys, config))


def read_falcon_h1(keys: Keys) -> ModelConfig:
    """Falcon-H1: attention and Mamba-2 side by side in every layer; halves rotate."""
    config = require_feed_forward(keys, read_common(keys))
    mamba = replace(_read_mamba(keys, config), layers=(True,) * config.layers, attends=True)
    return replace(config, mamba=mamba)


def read_nemotron_h(keys: Keys) -> ModelConfig:
    """Nemotron-H and Nemotron 3: Mamba-2 in layers without heads for keys and values and without a
    width, a feed forward alone in those with a width; nothing rotates."""
    epsilon = EPSILON if keys.has(EPSILON) else LAYER_NORM_EPSILON
    config = read_common(keys, read_no_rope, min_kv_heads=0, epsilon=epsilon)
    mamba = _read_mamba(keys, config)
    layers = tuple(
        not (heads or width)
        for heads, width in zip(config.kv_heads, config.feed_forward, strict=True)
    )
    for layer, (heads, width) in enumerate(zip(config.kv_heads, config.feed_forward, strict=True)):
        if heads and width:
            raise keys.error("feed_forward_length", f"is {width} in layer {layer}, which attends")
    return replace(config, mamba=replace(mamba, layers=layers))


def read_nemotron_h_moe(keys: Keys) -> ModelConfig:
    """Nemotron 3: experts without gates, chosen by a bias, and a shared one."""
    config = read_nemotron_h(keys)
    experts = read_plain_weights(keys, read_chosen_by_bias(keys, config, SIGMOID))
    if experts.leading_dense:
        raise keys.unsupported(LEADING_DENSE, f"is {experts.leading_dense}", "supported is 0")
    return replace(
        config,
        experts=replace(
            experts,
            gated=False,
            weight_scale=keys.factor(WEIGHT_SCALE),
            shared_width=keys.integer(SHARED_WIDTH, 1, MAX_WIDTH),
            shared_gate=False,
        ),
    )


def _read_mamba(keys: Keys, config: ModelConfig) -> Mamba:
    """Read the sizes of Mamba-2 layers and check that they are consistent."""
    heads = keys.integer("ssm.time_step_rank", 1, MAX_WIDTH)
    inner = keys.integer("ssm.inner_size", 1, MAX_WIDTH)
    groups = keys.integer("ssm.group_count", 1, MAX_WIDTH)
    for name, count, whole in (
        ("ssm.time_step_rank", heads, inner),
        ("ssm.group_count", groups, heads),
    ):
        if whole % count:
            raise keys.error(name, f"is {count}, must divide {whole}")
    return Mamba(
        taps=read_taps(keys),
        state_size=keys.integer("ssm.state_size", 1, MAX_WIDTH),
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        layers=tuple(count == 0 for count in config.kv_heads),
    )
