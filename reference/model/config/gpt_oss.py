"""Reads the metadata keys of gpt-oss: alternating windows, experts weighted among the chosen."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import read_common
from reference.model.config.dense import (
    WINDOW,
    refuse_other_sizes,
    refuse_sliding_base,
    window_pattern,
    with_window,
)
from reference.model.config.experts import read_experts_of_chosen
from reference.model.config.keys import MAX_CONTEXT, Keys
from reference.model.config.records import ModelConfig

PATTERN = 2
"""Every second layer has full attention, the first has a window."""


def read_gpt_oss(keys: Keys) -> ModelConfig:
    """gpt-oss: windows in every second layer, one rotation for all layers."""
    config = read_common(keys)
    refuse_sliding_base(keys, config.ropes[0])
    refuse_other_sizes(keys, config)
    window = keys.integer(WINDOW, 1, MAX_CONTEXT)
    sliding, rope = window_pattern(keys, config, PATTERN), config.ropes[0]
    return replace(
        with_window(config, window, sliding, rope, rope),
        experts=replace(read_experts_of_chosen(keys, config), biases=True),
        sinks=True,
    )
