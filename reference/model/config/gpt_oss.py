"""Reads the metadata keys of gpt-oss: alternating windows, experts weighted among the chosen."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import read_common
from reference.model.config.dense import WINDOW, window_pattern
from reference.model.config.experts import read_experts_of_chosen
from reference.model.config.keys import MAX_CONTEXT, Keys
from reference.model.config.records import ModelConfig

PATTERN = 2
"""Every second layer has full attention, the first has a window."""
SLIDING_BASE = "rope.freq_base_swa"


def read_gpt_oss(keys: Keys) -> ModelConfig:
    """gpt-oss: windows in every second layer, one rotation for all layers."""
    config = read_common(keys)
    base = config.ropes[0].base
    sliding_base = keys.positive(SLIDING_BASE, base)
    if sliding_base != base:
        raise keys.unsupported(SLIDING_BASE, f"is {sliding_base}", f"supported is {base}")
    window = keys.integer(WINDOW, 1, MAX_CONTEXT)
    sliding = window_pattern(keys, config, PATTERN)
    return replace(
        config,
        windows=tuple(window if slides else 0 for slides in sliding),
        experts=replace(read_experts_of_chosen(keys, config), biases=True),
        sinks=True,
    )
