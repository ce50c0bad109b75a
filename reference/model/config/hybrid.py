"""Reads the metadata keys of models that mix recurrent layers and attention layers."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.keys import MAX_LAYERS, MAX_WIDTH, Keys
from reference.model.config.records import DeltaNet, ModelConfig, ShortConv

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
        taps=keys.integer("ssm.conv_kernel", 2, MAX_TAPS),
        state_size=state_size,
        key_heads=key_heads,
        value_heads=value_heads,
        layers=_recurrent_layers(keys, config),
    )


def _recurrent_layers(keys: Keys, config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer is recurrent: from ``attention.recurrent_layers``, else by a fixed
    interval."""
    if keys.has("attention.recurrent_layers"):
        return keys.flags("attention.recurrent_layers", config.layers, config.blocks)
    interval = keys.integer("full_attention_interval", 1, MAX_LAYERS, DEFAULT_INTERVAL)
    return tuple((layer + 1) % interval != 0 for layer in range(config.layers))


def read_lfm2(keys: Keys) -> ModelConfig:
    """LFM 2: gated short convolutions in the layers without heads for keys and values."""
    config = require_feed_forward(keys, read_common(keys, least_kv_heads=0))
    layers = tuple(heads == 0 for heads in config.kv_heads)
    taps = keys.integer("shortconv.l_cache", 2, MAX_TAPS)
    return replace(config, short_conv=ShortConv(taps, layers))
