"""Reads the metadata keys of the language models of Qwen 2 VL, 2.5 VL and 3 VL, which see images
through another file. Only text is computed."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import read_experts
from reference.model.config.keys import MAX_LAYERS, Keys
from reference.model.config.records import ModelConfig
from reference.model.config.rope import require_equal_sections

SEEING = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
"""Architectures of language models whose images are in another file."""
DEEPSTACK = "n_deepstack_layers"


def read_qwen_vl(keys: Keys) -> ModelConfig:
    """Qwen 2 VL and 3 VL: Qwen 2 and 3, whose pairs rotate by positions that are equal for text."""
    return require_feed_forward(keys, _read_plain(keys))


def read_qwen_vl_experts(keys: Keys) -> ModelConfig:
    """Qwen 3 VL with experts."""
    config = _read_plain(keys)
    return replace(config, experts=read_experts(keys, config))


def _read_plain(keys: Keys) -> ModelConfig:
    """The configuration for text. What the first layers add of an image is nothing for text."""
    config = read_common(keys)
    require_equal_sections(keys)
    keys.integer(DEEPSTACK, 0, MAX_LAYERS, 0)
    return config
