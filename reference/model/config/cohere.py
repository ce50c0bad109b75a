"""Reads the metadata keys of Command R and Command R7B: norms that subtract the mean, windows."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import LAYER_NORM_EPSILON, read_common, require_feed_forward
from reference.model.config.dense import WINDOW, rotating_in_windows
from reference.model.config.keys import MAX_CONTEXT, Keys
from reference.model.config.records import ModelConfig
from reference.model.config.rope import read_interleaved_rope


def read_command_r(keys: Keys) -> ModelConfig:
    """Command R: neighbouring channels rotate; logits have a factor."""
    common = read_common(keys, read_interleaved_rope, epsilon=LAYER_NORM_EPSILON)
    scale = keys.positive("logit_scale", allow_zero=True) or 1.0
    return replace(require_feed_forward(keys, common), logit_scale=scale)


def read_cohere2(keys: Keys) -> ModelConfig:
    """Command R7B: layers with a window rotate, the others do not."""
    return rotating_in_windows(keys, read_command_r(keys), keys.integer(WINDOW, 1, MAX_CONTEXT))
