"""Reads the metadata keys of Command R and Command R7B: norms that subtract the mean, windows."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.dense import (
    WINDOW,
    refuse_other_sizes,
    refuse_sliding_base,
    window_pattern,
)
from reference.model.config.keys import MAX_CONTEXT, Keys
from reference.model.config.records import ModelConfig
from reference.model.config.rope import read_interleaved_rope, unrotated

LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
PATTERN = 4
"""Every fourth layer has full attention and no rotation, the others have a window."""


def read_command_r(keys: Keys) -> ModelConfig:
    """Command R: neighbouring channels rotate; logits have a factor."""
    common = read_common(keys, read_interleaved_rope, epsilon=LAYER_NORM_EPSILON)
    scale = keys.positive("logit_scale", allow_zero=True) or 1.0
    return replace(require_feed_forward(keys, common), logit_scale=scale)


def read_cohere2(keys: Keys) -> ModelConfig:
    """Command R7B: layers with a window rotate, the others do not."""
    config = read_command_r(keys)
    window, rope = keys.integer(WINDOW, 1, MAX_CONTEXT), config.ropes[0]
    refuse_sliding_base(keys, rope)
    refuse_other_sizes(keys, config)
    sliding = window_pattern(keys, config, PATTERN)
    return replace(
        config,
        windows=tuple(window if slides else 0 for slides in sliding),
        ropes=tuple(rope if slides else unrotated(rope) for slides in sliding),
    )
